"""The open-loop load generator behind `carpool bench`.

`schedule` says when requests are due, `payload` what they carry and whether an answer is right, `response`
reads HTTP, `client` keeps the connections and the pace, `tally` counts, `report` shows, `run` joins them.
"""
