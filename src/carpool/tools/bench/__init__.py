"""The open-loop load generator behind `carpool bench`.

`run` says what is sent and when, `payload` what a request carries and whether an answer is right, `generator` keeps the
pace, `tally` counts.
"""
