"""Changes for a case that does not fit, or fits only barely.

What is proposed, and where:

- changes of a case that are run before they are shown: `changes.py` lists them, `trials.py` runs them
- options that follow from an out-of-memory message and are not run, expandable segments among them:
  `suggestions_not_run.py`
- settings of a user's own script: `script/planning.py`, `script/tries.py`; without a plan `script/ladder.py`
- what a search may choose: `FREE` in `planner/search_space.py`
"""
