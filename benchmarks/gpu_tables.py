"""The tables of the GPU engine, from results/gpu_engine.json, gpu_start.json and gpu_correctness.json;
`benchmarks.make_tables` inserts them into the docs."""

from __future__ import annotations

from typing import Any, Final

from benchmarks import sources
from benchmarks.markdown import Result, table
from loraplex.core.words import plural

_LAST_PHASE: Final = "capturing graphs"
"""The phase of a start that ends when the engine is ready."""


def machine_note(result: Result) -> str:
    """Return a note with the commit of each section, as they may be measured at different times."""
    sections = {name: section for name, section in result.items() if "results" in section}
    first = next(iter(sections.values()))
    commits = ", ".join(f"{name} at {section['git_commit']}" for name, section in sections.items())
    days = sorted({section["date"][:10] for section in sections.values()})
    return (
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on one {first['machine']['gpu']} "
        f"({first['machine']['gpu_memory_mib']:,} MiB, {first['machine']['cores']} CPU cores), Python "
        f"{first['python']}, torch {first['packages']['torch']}, triton {first['packages']['triton']}. "
        f"{first['shape']} shape, random weights, bfloat16, LoRA on q, k and v unless said. "
        f"Commits: {commits}.\n"
    )


def decode_table(result: Result) -> str:
    lines = [
        (
            row.get("shape", result["decode"]["shape"]),
            row["name"],
            f"{row['itl_ms']['mean']:.2f}",
            f"{row['itl_ms']['p50']:.2f}",
            f"{row['itl_ms']['p99']:.2f}",
        )
        for row in result["decode"]["results"]
    ]
    return table(("shape", "decode", "ITL mean, ms", "p50", "p99"), lines)


def prompts_table(result: Result) -> str:
    """Show prompts that run alone."""
    lines = []
    for row in result["prompts"]["results"]:
        figures = [
            f"{row[key]['p50']:.1f} ({1e3 * row[key]['p50'] / row['prompt_tokens']:.1f})"
            for key in ("ttft_ms", "adapter_ttft_ms")
        ]
        lines.append((row["shape"], f"{row['prompt_tokens']:,}", *figures))
    heads = ("TTFT, ms (us a token)", "with an adapter of rank 64 on q, k, v")
    return table(("shape", "prompt tokens", *heads), lines)


def prompt_attention_table(result: Result) -> str:
    """Show the attention of a prompt's rows in one layer, by kernel."""
    kernels = {"ours_us": "ours", "flash_us": "FlashAttention in torch", "cudnn_us": "cuDNN through torch"}
    for key, name in (("vllm_us", "FlashAttention 3 of vLLM"), ("flashinfer_us", "FlashInfer")):
        if any(row.get(key) is not None for row in result["prompt_attention"]["results"]):
            kernels[key] = name
    lines = []
    for row in result["prompt_attention"]["results"]:
        figures = ["-" if row.get(key) is None else f"{row[key]:,.0f}" for key in kernels]
        lines.append((row["shape"], f"{row['rows']:,} of {row['context']:,}", *figures))
    return table(("shape", "rows of context", *(f"{name}, us" for name in kernels.values())), lines)


def serve_table(result: Result) -> str:
    lines = []
    for row in result["serve"]["results"]:
        ranks = ", ".join(str(rank) for rank in row["ranks"])
        adapters = f"{row['adapters']} of rank {ranks}" if row["adapters"] else "none"
        figures = [
            f"{row[name]['mean']:,.1f} ({row[name]['p95']:,.1f})" for name in ("ttft_ms", "tpt_ms", "e2e_ms")
        ]
        lines.append((row["workload"], adapters, *figures, f"{row['output_tokens_per_s']:,.0f}"))
    headings = ("workload", "adapters", "TTFT ms, mean (p95)", "TPT ms", "E2E ms", "output tok/s")
    return table(headings, lines)


def block_tables_table(result: Result) -> str:
    """Show the host's cost of a step with many requests, by their context."""
    lines = [
        (
            f"{row['requests']} requests, {row['context']:,} tokens each",
            f"{row['build_ms']:.1f} ms",
            f"{row['step_ms']:.1f} ms",
            f"{row['tables_read_again_build_ms']:.1f} ms",
            f"{row['tables_read_again_step_ms']:.1f} ms",
        )
        for row in result["tables"]["results"]
    ]
    headings = ("context", "building a batch", "whole step", "building, tables read again", "whole step")
    return table(headings, lines)


def registered_table(result: Result) -> str:
    lines = [
        (
            f"{row['adapters']:,}",
            f"{row['output_tokens_per_s']:,.0f}",
            f"{row['ttft_ms']['mean']:.1f} ({row['ttft_ms']['p95']:.1f})",
            f"{row['tpt_ms']['mean']:.2f}",
        )
        for row in result["registered"]["results"]
    ]
    return table(("adapters", "output tok/s", "TTFT ms, mean (p95)", "TPT ms"), lines)


def padded_table(result: Result) -> str:
    lines = [
        (row["name"], f"{row['itl_ms']['mean']:.2f}", f"{row['padded_itl_ms']['mean']:.2f}")
        for row in result["padded"]["results"]
    ]
    return table(("decode, 32 requests, each with its adapter", "ITL mean, ms", "padded"), lines)


def correctness_table(result: Result) -> str:
    """Show the checks, which count as passed only if they ran on the current code."""
    lines = [
        (name, _verdict(name, section), section["date"][:10], section["git_commit"] or "unknown")
        for name, section in result.items()
    ]
    return table(("section", "checks passed", "measured", "commit"), lines)


def _verdict(name: str, section: Result) -> str:
    passed = sum(check["passed"] for check in section["checks"])
    found = f"{passed} of {len(section['checks'])}"
    changed = sources.changed_since(section, "gpu_correctness.json", name)
    if changed is None:
        return f"{found}, of unknown age: the result does not say which code it ran"
    if changed:
        return f"**not run** since {', '.join(f'`{path}`' for path in changed)} changed"
    return found if section["passed"] else f"**{found}**"


def kernels_table(result: Result) -> str:
    found = result["kernels"]["results"]
    lines = [
        (
            str(row["adapters"]),
            str(row["rank"]),
            f"{row['shrink_mb']:.1f}",
            _rate(row, "shrink"),
            _rate(row, "expand"),
        )
        for row in found["rows"]
    ]
    return table(("adapters", "rank", "MB a launch", "shrink", "expand"), lines)


def shared_kernels_table(result: Result) -> str:
    lines = [
        (
            row["name"],
            f"{row['shrink_us']:.1f} µs",
            f"{row['expand_us']:.1f} µs",
            f"{row['shrink_us'] + row['expand_us']:.1f} µs",
        )
        for row in result["kernels"]["results"].get("shared", ())
    ]
    return table(("rank 64 unless said", "shrink", "expand", "together"), lines)


def attention_table(result: Result) -> str:
    lines = [
        (
            str(row["requests"]),
            f"{row['as_they_came_us']:.1f}",
            f"{row['longest_first_us']:.1f}",
            f"{row['longest_first_tb_per_s']:.2f}",
        )
        for row in result["attention"]["results"]
    ]
    headings = ("requests that decode", "as they came, µs a layer", "longest first", "TB/s")
    return table(headings, lines)


def decode_attention_table(result: Result) -> str:
    """Return one row for each shape and number of requests; no table before it was measured."""
    rows = result.get("decode_attention", {}).get("results")
    if not rows:
        return "Not measured yet.\n"
    kernels = {"ours_us": "ours", "vllm_us": "FlashAttention 3 of vLLM", "flashinfer_us": "FlashInfer"}
    lines = [
        (
            row["shape"],
            f"{row['requests']} of {row['mean_context']} tokens",
            *("-" if row[key] is None else f"{row[key]:,.0f}" for key in kernels),
        )
        for row in rows
    ]
    return table(("shape", "requests", *(f"{name}, us" for name in kernels.values())), lines)


def cold_table(result: Result) -> str:
    found = result["cold"]["results"]
    lines = [
        ("process started and first token", f"{found['start_to_first_token_s']:.1f} s"),
        ("process started and every graph captured", f"{found['start_to_all_graphs_s']:.1f} s"),
        ("memory that all graphs take", f"{found['graphs_gb']:.1f} GB"),
    ]
    return table(("start", "measured"), lines)


def start_note(result: Result) -> str:
    machine = result["machine"]
    return (
        f"Measured {result['date'][:10]} on one {machine['gpu']} ({machine['cores']} CPU cores), torch "
        f"{result['packages']['torch']}, triton {result['packages']['triton']}, {result['shape']} shape, "
        f"random weights, {result['adapters']} adapters of rank {result['rank']}, commit "
        f"{result['git_commit']}.\n"
    )


def start_table(result: Result) -> str:
    """Show the phases of an engine's start in order, and the total time of a server's start."""
    starts = result["engine"]
    phases = [{phase["phase"]: _phase(phase) for phase in start["phases"]} for start in starts]
    lines = []
    for name in dict.fromkeys(name for start in phases for name in start):
        lines.append((name, *(start.get(name, "-") for start in phases)))
        if name == _LAST_PHASE:
            lines.append(("**engine ready, in all**", *(f"**{start['ready_s']:.1f} s**" for start in starts)))
    servers = (f"**{start['ready_s']:.1f} s**" for start in result["server"])
    lines.append(("**`loraplex serve` ready, in all**", *servers))
    lines.append(("phases that `loraplex serve` reports", *(start["said"] for start in result["server"])))
    return table(("phase", *(f"{start['cache']} cache" for start in starts)), lines)


def _phase(phase: dict[str, Any]) -> str:
    num_compiled = phase["kernels_compiled"]
    compiled = f", {num_compiled} {plural('kernel', num_compiled)} compiled" if num_compiled else ""
    return f"{phase['seconds']:.1f} s{compiled}"


def _rate(row: dict[str, Any], kernel: str) -> str:
    return f"{row[f'{kernel}_us']:.1f} µs, {row[f'{kernel}_tb_per_s']:.2f} TB/s"
