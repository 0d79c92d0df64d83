"""What `digenrl doctor` looks at: each check is a function that returns findings.

finding     Finding, and how it counts
software    Python, packages, optional extras and tools
machine     processor, memory, CUDA devices, disk, ports, running servers
model       a checkpoint, against its own pipeline
trial       the shipped model and the OCR recogniser, for real
"""
