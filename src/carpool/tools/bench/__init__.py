"""The open-loop load generator behind `carpool bench`.

`options` says what is sent and when, `payload` what a request carries and whether an answer is right, `generator` keeps
the pace, `tally` counts, `run` joins them.
"""
