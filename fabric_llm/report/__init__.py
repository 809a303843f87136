"""Runs to look at: `python -m fabric_llm.report checkpoints/RUN` writes one HTML file that needs no network.

reading      `read_run`: a run directory -> `Run`, plain data
figures      `figures`, `as_data`: the curves, thinned out so that their extremes stay
timeline     `timeline`: what happened to a run
summary      `headline`, `facts`, `differing_flags`: a run in a few words and numbers
certificate  `quick`, `whole`: what `python -m fabric_llm.verify` finds
sections     each section of the report as HTML
page         `document`: the page around sections and figures, with page.css, page.js and plotly inside
"""
