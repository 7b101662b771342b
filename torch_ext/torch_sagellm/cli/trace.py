"""``torch-sagellm trace``: merges the dumps of all ranks into one trace for Perfetto."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch_sagellm._private.units import show_time
from torch_sagellm.cli import arguments
from torch_sagellm.cli.show import complain
from torch_sagellm.observe import timeline

HELP = "merge the dumps of all ranks into one trace for Perfetto"
DESCRIPTION = """Reads what ranks wrote: traces (torch_sagellm.write_trace), files that failed groups left in
SAGELLM_DUMP_DIR, flight records (torch_sagellm.dump_flight_record, or torch's own). Writes one trace with a process for
each rank, a row for each group, and arrows between the ranks' parts of one collective. Open it in
https://ui.perfetto.dev."""
EXAMPLES = """examples:
  torch-sagellm trace dumps/                        a folder of dumps into trace.json
  torch-sagellm trace trace_0.json trace_1.json -o job.json
  torch-sagellm trace dumps/ --align                clocks of the hosts differ: collectives are drawn to end together
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=arguments.path, metavar="FILE_OR_FOLDER", help="what the ranks wrote")
    parser.add_argument(
        "-o", "--output", type=arguments.path, default=Path("trace.json"), help="the trace (trace.json)"
    )
    parser.add_argument("--align", action="store_true", help="shift each rank's clock so that collectives end together")
    arguments.add_json(parser, "what was merged")


def run(parsed: argparse.Namespace) -> int:
    arguments.check_output("--output", parsed.output)
    merged = timeline.merge_traces(parsed.paths, parsed.output, align=parsed.align)
    if parsed.json:
        output = str(parsed.output) if merged.operations else None
        print(json.dumps({**merged._asdict(), "output": output}))
        return 0 if merged.operations else 1
    for rank, shift in merged.shifts.items():
        if shift:
            print(f"rank {rank} was shifted by {'-' if shift < 0 else ''}{show_time(abs(shift) / 1e9)}")
    if not merged.operations:
        complain("torch-sagellm trace: the files hold no operations; nothing was written")
        return 1
    ranks = ", ".join(map(str, merged.ranks))
    print(f"{merged.operations} operations of ranks {ranks} in {parsed.output}; open it in https://ui.perfetto.dev")
    return 0
