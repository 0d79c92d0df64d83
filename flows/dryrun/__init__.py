"""`digenrl train PRESET --dry-run`: one small iteration of a run, and what the run itself would need.

shrink     the configuration with a tiny checkpoint and small sizes; everything that decides what is computed stays
witness    a listener that notes what the iteration shows
needs      memory, time and download of the configuration as given
report     what is printed
"""
