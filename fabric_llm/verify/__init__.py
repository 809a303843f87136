"""Prove what was trained: `python -m fabric_llm.verify` verifies a run, or trains, kills and
resumes one.

inspect_run  `verify_run`: everything about a run, as a `Report`
drill        `drill`: train twice, kill and resume one run, compare bit for bit
"""
