"""The open-loop load generator behind `carpool bench`.

`schedule` says when requests are due, `tiers` of whom they are, `payload` what they carry and whether an answer is
right (`embeddings`: of vectors), `response` reads HTTP, `connection` carries one at a time, `generator` keeps the pace,
`tally` counts, `report` shows, `run` joins them.
"""
