"""Dask: clusters, the replica on a worker, and the engine that drives the scheduler.

forkserver processes that begin with the heavy modules imported
cluster    where work runs: a local cluster or a scheduler's address
presence   incarnations: who joined, who is gone
replica    what one worker holds, and the units it runs
calls      what the engine sends to a worker, as picklable functions
engine     the wall-clock driver of digenrl.scheduling
tensors    torch tensors on Dask's wire
"""
