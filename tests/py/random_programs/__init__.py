"""Random whole programs of torch.distributed calls, each with results that are known in advance.

`generate` draws a program from a seed. A program is plain data (`program`). `model` executes it in one process: it
computes the memory of every rank and decides whether the program is legal. `execute` is one rank: it makes the calls
and compares the results. `run` manages the rank processes, and `shrink` shortens a failing program. By hand:

    python -m random_programs --seed 7              one program; if it fails, the whole program and its verdict
    python -m random_programs --count 1000          that many programs, from --seed on
    python -m random_programs --at nccl --count 50  on a simulated device; --unchanged: the programs of one host's CPU
    python -m random_programs --file program.json   a program that was kept as JSON
"""
