"""What a run would take on a fleet: costs, memory, roles and schedules, for `digenrl plan` and `digenrl simulate`.

subject     what is planned: a configuration, or a workload of known size
costs       what its units cost, and where that is known from
fleet       a fleet file
memory      what a worker must hold
place       subject, fleet, costs and memory together
schedules   schedules to compare, tried on the virtual clock
tables      what is printed
chart       the Gantt chart
"""
