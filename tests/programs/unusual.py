"""Scripts that do something unusual: one way each.

python unusual.py crashes|hangs|no-gpu|never-steps|spawns|workers|exits|exits-hard|index|talks|subprocess|dies|...
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import time


def train(steps: int = 2) -> None:
    """A little training."""
    import torch

    layer = torch.nn.Linear(32, 32).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        layer(torch.randn(4, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def child(rank: int) -> None:
    """What a spawned process does."""
    train()


def rank_of_two(rank: int) -> None:
    """A rank that a program spawns itself; the second one's card is full when all have agreed on a number."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29617", rank=rank, world_size=2)
    total = torch.tensor([rank + 1.0], device="cuda")
    dist.all_reduce(total)
    print(f'{{"rank": {rank}, "total": {total.item()}}}', flush=True)
    train()
    dist.destroy_process_group()
    if rank == 1 and sys.argv[2:] == ["too-big"]:
        torch.empty(2**40, dtype=torch.uint8, device="cuda")


def with_a_rank_of_its_own() -> None:
    """Starts its second rank, and ends before that one does."""
    command = [sys.executable, __file__, "second-rank"]
    second = subprocess.Popen(command, env={**os.environ, "RANK": "1"}, stdout=subprocess.PIPE)
    assert second.stdout is not None
    second.stdout.readline()  # it trains
    train(1)


def leave_behind(**options: bool) -> None:
    """Starts a process that goes on for an hour, and says by which words it is known among all others."""
    own = f"left by {os.getpid()} of {os.environ['GHOST_SHM']}"
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", own], **options)
    print(json.dumps({"left": own}), flush=True)


def second_rank() -> None:
    """Still trains when the process that started it has ended."""
    parent = os.getppid()
    train(1)
    print("trains", flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    train(2)


def in_backward() -> None:
    """The optimizer steps while gradients are being made, parameter by parameter."""
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).cuda()
    for parameter in layers.parameters():
        optimizer = torch.optim.AdamW([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(3):
        layers(torch.randn(4, 32, device="cuda")).sum().backward()
        layers.zero_grad()


def on_two_cards() -> None:
    """One process, a layer on each of two cards, more of it on the second."""
    import torch

    layers = [torch.nn.Linear(256, 2048).to("cuda:0"), torch.nn.Linear(2048, 2048).to("cuda:1")]
    optimizer = torch.optim.SGD([*layers[0].parameters(), *layers[1].parameters()], lr=0.1)
    for _ in range(2):
        layers[1](layers[0](torch.randn(4, 256, device="cuda:0")).to("cuda:1")).sum().backward()
        optimizer.step()


def measures_itself() -> None:
    """Resets the peaks and turns the allocator's history on and off, as programs do that measure a part."""
    import torch

    train(1)
    torch.empty(2**26, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=10)
    torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    train(2)


def allocates_often() -> None:
    """Asks for memory a hundred thousand times, and says what the host's came to."""
    import resource

    import torch

    train(1)
    for _ in range(100_000):
        torch.empty(512, device="cuda")
    print(json.dumps({"resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def beside_a_server() -> None:
    """Trains beside another process that holds most of the card: one that is killed, and one that stays."""
    import torch

    for stays in (False, True):
        server = subprocess.Popen([sys.executable, __file__, "serves"], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()  # it holds its memory
        print(json.dumps({"free": torch.cuda.mem_get_info()[0], "server": server.pid}), flush=True)
        if not stays:
            server.kill()
            server.wait()
        train(1)
        torch.empty(9 * 2**30, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()


def serves() -> None:
    """Holds eight GiB until it is killed."""
    import torch

    _held = torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")
    print("serves", flush=True)
    time.sleep(3600)


def counts_its_boxes() -> None:
    """A detector's targets, all floats: which image each belongs to, and four numbers.  The largest count is used."""
    import torch

    targets = torch.rand(5, 5)
    targets[:, 0] = torch.tensor([0, 0, 0, 1, 1])
    layer = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        outputs = layer(torch.randn(5, 4, device="cuda"))
        images = targets.cuda()[:, 0] * 1
        counts = images.long().unique(return_counts=True)[1]
        print(json.dumps({"most": int(counts.max())}), flush=True)
        outputs.sum().backward()
        optimizer.step()


def chooses_by_masks() -> None:
    """Rows that two masks choose together, both from the host; and rows that a computed one chooses."""
    import torch

    layer = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    attended, labels = torch.ones(8, 32, dtype=torch.long), torch.arange(8 * 32).view(8, 32)
    attended[:, 24:] = 0
    labels[:, :16] = -100
    for _ in range(2):
        outputs = layer(torch.randn(8, 32, 4, device="cuda"))
        chosen = outputs[attended.cuda().bool() & (labels.cuda() != -100)]
        print(json.dumps({"chosen": len(chosen), "computed": len(outputs[outputs > 0])}), flush=True)
        chosen.sum().backward()
        optimizer.step()


def with_workers() -> None:
    """Data from two forked workers, pinned."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    layer = torch.nn.Linear(32, 32).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(64, 32))
    for (batch,) in DataLoader(rows, batch_size=16, num_workers=2, pin_memory=True, persistent_workers=True):
        layer(batch.cuda(non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Rows:
    """Data of which one row is not there."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> object:
        raise FileNotFoundError("row0.wav is not there")


def with_a_worker_that_fails() -> None:
    from torch.utils.data import DataLoader

    train(1)
    next(iter(DataLoader(Rows(), num_workers=1)))


def multiplies() -> None:
    import torch

    torch.ones(3, dtype=torch.long, device="cuda").prod()  # torch compiles this kernel when it is wanted
    train()


def trains_on_the_host() -> None:
    """Asks about the GPU, and does not use it."""
    import torch

    torch.cuda.init()
    layer = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(4):
        layer(torch.randn(4, 32)).sum().backward()
        optimizer.step()


def converges() -> None:
    """Until the loss is small."""
    import torch

    layer = torch.nn.Linear(32, 32).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(100):
        loss = layer(torch.randn(4, 32, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        if loss.item() < 1e-3:
            break


def in_parts() -> None:
    """The layers of a network are called one by one, and nobody makes a step."""
    import torch

    network = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4))}).cuda()
    network["head"] = torch.nn.Linear(512, 2000, device="cuda")
    hidden = torch.randn(8, 512, device="cuda")
    for layer in network["layers"]:
        hidden = layer(hidden)
    network["head"](hidden).sum().backward()


def scripts() -> None:
    """Torch's functions by what they are: in TorchScript, in a pickle, and of what torch.fx has for a tensor."""
    import torch
    from torch import nn

    @torch.jit.script
    def largest(rows: torch.Tensor) -> torch.Tensor:
        found = torch.sum(torch.topk(torch.max(rows, dim=-1)[0], 2)[1])
        return found if bool(torch.any(torch.isnan(rows))) else torch.cumsum(torch.unique(rows), 0)

    @torch.jit.script
    def chosen(places: torch.Tensor) -> torch.Tensor:
        return places if torch.equal(places, places + 1) else nn.functional.one_hot(places, 4)

    largest(torch.randn(4, 4).cuda())
    chosen(torch.zeros(4, dtype=torch.long).cuda())
    for function in (torch.max, torch.sum, torch.unique, torch.equal, nn.functional.one_hot):
        assert pickle.loads(pickle.dumps(function)) is function

    class Choosing(nn.Module):
        def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            one, none = torch.eq(scores, 1), torch.isnan(scores)
            several = torch.all(one), torch.isfinite(scores), torch.equal(one, none), torch.greater(scores, 0)
            return (torch.topk(scores, 2)[1], torch.allclose(scores, torch.argmax(scores, -1)), *several)

    assert len(torch.fx.symbolic_trace(Choosing()).graph.nodes) == 12
    model = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU())).cuda()
    model(torch.randn(8, 64).cuda()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def main() -> None:
    what = sys.argv[1]
    if what == "crashes":
        train(1)
        os.chdir("/")
        raise ValueError("the tokenizer has no pad token")
    if what == "crashes-early":
        import torch

        torch.nn.Linear(32, 32).cuda()(torch.randn(4, 32, device="cuda"))
        print("begins", flush=True)
        raise ValueError("the column has no text")
    if what == "hangs":
        train(4)
        print("hangs", flush=True)
        time.sleep(3600)
    elif what == "is-killed":
        train(2)
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "has-a-path":
        command = f"PYTHONPATH=/own/code {sys.executable} {__file__} imports-from-its-path"
        raise SystemExit(subprocess.run(command, shell=True, check=False).returncode)
    elif what == "imports-from-its-path":
        assert "/own/code" in sys.path
        train(4)
    elif what == "worker-fails":
        with_a_worker_that_fails()
    elif what == "on-the-host":
        trains_on_the_host()
    elif what == "no-gpu":
        import torch

        torch.nn.Linear(32, 32)(torch.randn(4, 32)).sum().backward()
    elif what == "never-steps":
        import torch

        with torch.no_grad():
            torch.nn.Linear(1024, 1024).cuda()(torch.randn(4, 1024, device="cuda"))
    elif what == "spawns":
        import torch

        torch.multiprocessing.spawn(child, nprocs=2)
    elif what == "ranks":
        import torch

        torch.multiprocessing.spawn(rank_of_two, nprocs=2)
    elif what == "forks":
        import multiprocessing

        import torch

        process = multiprocessing.get_context("fork").Process(target=train)
        process.start()
        process.join()
    elif what == "subprocess":
        train(3)
        subprocess.run([sys.executable, __file__, "exits"], check=True)
    elif what == "beside-a-server":
        beside_a_server()
    elif what == "serves":
        serves()
    elif what == "converges":
        converges()
    elif what == "counts":
        counts_its_boxes()
    elif what == "masks":
        chooses_by_masks()
    elif what == "two-cards":
        on_two_cards()
    elif what == "measures":
        measures_itself()
    elif what == "often":
        allocates_often()
    elif what == "workers":
        with_workers()
    elif what == "exits":
        train()
        sys.exit(0)
    elif what == "exits-hard":
        train()
        os._exit(0)
    elif what == "exits-badly":
        train()
        sys.exit(7)
    elif what == "index":
        import torch

        train(1)
        lengths = (torch.rand(3, device="cuda") + 1).long().tolist()
        [1, 2, 3].index(lengths[0])
    elif what == "talks":
        for line in range(200_000):
            print(f"line {line} of a very talkative script")
        train()
    elif what == "leaves-a-child":
        leave_behind()
        train()
    elif what == "leaves-a-service":
        leave_behind(start_new_session=True)
        train()
    elif what == "leaves-a-rank":
        with_a_rank_of_its_own()
    elif what == "second-rank":
        second_rank()
    elif what == "in-backward":
        in_backward()
    elif what == "clears-its-environment":
        os.environ.clear()
        train()
    elif what == "scripts":
        scripts()
    elif what == "in-parts":
        in_parts()
    elif what == "multiplies":
        multiplies()
    elif what == "dies":
        train()
        os.abort()
    elif what == "interrupted":
        train(1)
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
