"""One script per figure. Scripts print a table and can write JSON; none of them is a timed test.

train_step, rollout   our units against the published loop and the pipeline's call (docs/performance.md)
memory    the memory model against the allocator (docs/performance.md)
gpu       real sizes, where there is a GPU

    sides              both sides of those comparisons

learn     does it learn: held-out reward of tiny-ocr over several seeds (docs/learning.md)
rewards   what rewards cost, alone, served, and how much of it a run waits for (docs/rewards.md)
prompts   opening a million prompts: time and memory (docs/data.md)
overhead  what orchestration costs, against the plain loop (docs/performance.md)

    overhead_probe     a process per layout, kept for all runs of it
    overhead_run       the runs that are measured, in that process
    overhead_figures   from what was measured to figures
    overhead_tables    from figures to what people read
"""
