"""Prefect task runs: thin observers of units that Dask computes.

kinds      one Prefect task per kind of unit
observers  opens and closes task runs as the engine hands out units
"""
