"""Write and read the rows of a latent cache with mosaicml-streaming, for `storage.py --mosaic`.

python -m venv mosaic
mosaic/bin/pip install mosaicml-streaming pyarrow      # needs numpy < 2.2
python benchmarks/storage.py --mosaic mosaic/bin/python
"""

import json
import sys
import tempfile
import time
from pathlib import Path


def write(cache, folder, shard_bytes):
    """Write a cache's latents and embeddings as MDS, in shards of about `shard_bytes` bytes."""
    import pyarrow as pa
    from streaming import MDSWriter

    names = "latents", "prompt_embeds"
    columns = dict.fromkeys(names, "ndarray:float16")
    with MDSWriter(out=folder, columns=columns, size_limit=int(shard_bytes)) as writer:
        for path in sorted(Path(cache).glob("*.arrow")):
            for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
                rows = {
                    name: batch[name].flatten().to_numpy().reshape(len(batch), -1) for name in names
                }
                for i in range(len(batch)):
                    writer.write({name: rows[name][i] for name in names})


def read(batch_size, local, remote=None, limit=None):
    """Return (rows per second, seconds to the first batch) of one shuffled epoch."""
    import torch
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    begin = time.perf_counter()
    options = {"cache_limit": int(limit)} if limit else {}
    dataset = StreamingDataset(
        remote=remote, local=local, shuffle=True, batch_size=int(batch_size), **options
    )
    batches = iter(torch.utils.data.DataLoader(dataset, int(batch_size)))
    count = len(next(batches)["latents"])
    first = time.perf_counter()
    rows = sum(len(batch["latents"]) for batch in batches)
    assert rows + count == len(dataset)
    return rows / (time.perf_counter() - first), first - begin


if __name__ == "__main__":
    what, *argv = sys.argv[1:]
    if what == "write":
        write(*argv)
    else:
        with tempfile.TemporaryDirectory(
            dir=Path(argv[1]).parent, ignore_cleanup_errors=True
        ) as folder:
            argv[1] = folder if len(argv) > 2 else argv[1]  # an empty folder for fetched shards
            print(json.dumps(read(*argv)), flush=True)
