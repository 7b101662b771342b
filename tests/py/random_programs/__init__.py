"""Random whole programs through torch.distributed, each of whose results is known in advance.

`generate` draws a program from a seed; a program is plain data (`program`). `model` carries it out in one process and
says what every rank's memory must hold, and whether the program is legal at all. `execute` is a rank: it makes the
calls and compares. `run` has the processes, `shrink` makes a failing program short. By hand:

    python -m random_programs --seed 7              one program, in full words where it fails
    python -m random_programs --count 1000          that many, from --seed on
    python -m random_programs --at nccl --count 50  on a simulated device; --unchanged: the programs of one host's CPU
    python -m random_programs --file program.json   one that was kept
"""
