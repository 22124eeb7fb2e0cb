"""One self-contained HTML page from a run folder or a plan file.

It reads files only: no torch, no planner, no engine. What a page shows is what the files say, plus what
the problem format's formulas make of a plan (`forecast.py`).
"""
