"""nissa: telemetry -- what is recorded of a run, and what is shown of it.

Records: `ledger.py` of one model, `database.py` of a training run. Views: `page.py` and
`page_parts` for a ledger, `watch_server.py` for runs, `console.py` and `tensorboard.py`.
"""
