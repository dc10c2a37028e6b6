"""Checks outside of a run: `rltrain verify` (layouts) and `rltrain routes` (route files).

Read `verify_command` first, then `one_rank_oracle`, which compares a layout with one rank.
For routes read `routes_command`; `routes_file` is the format, `offline_pass` makes and replays one.
"""
