"""What contiguous and power-of-two buffers for keys and values would waste beside paged ones, on one and the same run.

A trace is replayed in virtual time; while its sequences run, `quire.simulate.waste` keeps the books of each way. How
fast the simulated device is decides only how many run together.

    python benchmarks/waste.py [--trace mooncake_conversation_trace.jsonl] [--limit 2000]
"""

from __future__ import annotations

import argparse

from common import print_header, print_table

from quire.config import EngineConfig
from quire.engine.resolve import load_info
from quire.simulate.run import long_enough, make_cost, simulate
from quire.simulate.trace import draw, parse_synthetic, read_trace
from quire.simulate.waste import WasteMeter, waste_report

CHAT = "poisson:rate=8,num=2000,prompt=300,output=300,spread=0.9,prefix=30,groups=4"
DEVICE = "roofline:bandwidth=2000,gflops=200000,memory=64,params=8"


def main() -> None:
    """Replay and print one table for each context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="JSON lines; default: a drawn load of chats")
    parser.add_argument("--synthetic", default=CHAT)
    parser.add_argument("--limit", type=int, help="only the first requests")
    parser.add_argument("--cost-model", default=DEVICE)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--num-blocks", type=int, default=60000)
    parser.add_argument("--max-model-len", type=int, nargs="*", default=[], help="default: the longest request's")
    args = parser.parse_args()
    print_header("KV slots wasted")
    if args.trace is not None:
        requests = read_trace(args.trace, limit=args.limit)
    else:
        requests = draw([parse_synthetic(args.synthetic)])[: args.limit]
    rows = []
    for context in args.max_model_len or [max(request.num_tokens for request in requests)]:
        config = EngineConfig.from_kwargs(
            max_num_seqs=args.max_num_seqs, num_gpu_blocks_override=args.num_blocks, max_model_len=context
        )
        info = long_enough(load_info(config), config, requests)
        cost, memory = make_cost(args.cost_model, config, info)
        meter = WasteMeter(requests)
        simulate(config, info, requests, cost, memory, meter)
        for way, found in waste_report(meter.slots).items():
            shares = (f"{found[name]:.2%}" for name in ("used", "reserved", "internal", "external"))
            rows.append([way, str(context), *shares, f"{found['against_paged']:.2f}", f"{found['peak_slots']:,.0f}"])
        rows.append(
            [f"most beyond its tokens, of {config.cache.block_size - 1}", "", *[""] * 5, str(meter.max_paged_waste)]
        )
    print_table(("way", "context", "used", "reserved", "internal", "external", "x paged", "most slots"), rows)


if __name__ == "__main__":
    main()
