"""Runs to look at: `python -m fabric_llm.report checkpoints/RUN` writes one HTML file that needs no
network.

reading  `read_run`: a run directory -> `Run`, plain data; `timeline`: what happened to it
figures  `charts`, `marks`: runs as plotly's traces, thinned out so that their extremes stay
line     `write`: points between a base model and a run, for fabric_llm.average
page     `write`: what is said about runs in words and numbers, and page.html, which all of it goes
         into
"""
