"""A run before it begins, drawn: `python -m fabric_llm.preview FLAGS OF train.py` writes one HTML file.

course   `course`: learning rate, shares, epochs, checkpoints and evaluations over the steps of a plan
"""
