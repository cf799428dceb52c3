"""The commit protocol of many ranks in virtual time, over a network and a disk that do everything they may do.

python -m tests.simulator --seeds 20000          many seeds; prints the first that fails
python -m tests.simulator --seed 4711 --trace    one seed, with everything that happened
"""
