"""The demo: train on a real log, get killed in the middle of a save, resume, and end with the same bits all the same.

    python -m demo [--scale 10] [--out .demo] [--gpu]

1. `log` reads the Python standard library: each source file is a user, each identifier an item.
2. `train` is a process of its own: item2vec over three hash tables and a small MLP, with a checkpoint every few steps.
3. `child` starts it and reads its events; `crash` kills it with SIGKILL while a save is in flight, and starts it again.
4. `digests` compares every table, the MLP and its optimizer with those of a run that nobody disturbed.
5. `neighbours`, `report` and `timeline` show what the model learned and what the checkpoints cost, beside torch.save.
"""
