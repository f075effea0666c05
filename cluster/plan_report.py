"""A plan as text for a terminal and a README."""

from typing import Any

_GB = 1e9
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
Rows = list[tuple[str, str]]


def render(plan: dict[str, Any]) -> str:
    """The tables of `Plan.as_json()`."""
    parts = [_header(plan), _table(_memory_rows(plan)), _table(_time_rows(plan))]
    if plan["compiled"] is not None:
        parts.append(_compiled(plan["compiled"]))
    return "\n\n".join(parts)


def _header(plan: dict[str, Any]) -> str:
    device, (data, model) = plan["device"], plan["mesh"]
    return (
        f"{plan['model']}: {plan['num_layers']} layers, {plan['num_params'] / 1e9:.1f} billion parameters, "
        f"{plan['num_active_params'] / 1e9:.1f} billion of them for each token\n"
        f"mesh {data}x{model} (data x model), experts by {plan['expert_sharding']}; weights {plan['weight_dtype']}, "
        f"activations {plan['activation_dtype']}, cache {plan['cache_dtype']}\n"
        f"each device: {device['memory_bytes'] / _GB:g} GB, of which {plan['memory_fraction']:g} is taken, "
        f"{device['bandwidth_bytes_per_s'] / _GB:g} GB/s, {device['flop_per_s'] / 1e12:g} TFLOP/s"
    )


def _memory_rows(plan: dict[str, Any]) -> Rows:
    memory, context, slots = plan["bytes_per_device"], plan["context_len"], plan["num_slots"]
    verdict = "fit" if plan["fits"] else "DO NOT FIT"
    limit = f"the model's limit; the memory holds {plan['context_that_memory_holds']}"
    if plan["context_that_memory_holds"] == plan["largest_context"]:
        limit = "the memory's limit"
    return [
        ("memory of a device that may be taken", _size(memory["usable"])),
        *((f"weights, {dtype}", _size(size)) for dtype, size in memory["weights"].items()),
        ("workspace of a step (estimate)", _size(memory["workspace_estimate"])),
        ("left for the cache", _size(memory["free_for_cache"])),
        (f"cache of a slot of {context} tokens", _size(memory["cache_per_slot"])),
        (f"cache of a page of {plan['page_size']} tokens", _size(plan["page_size"] * memory["cache_per_position"])),
        (f"slots of {context} tokens that fit", str(plan["num_slots_that_fit"])),
        ("pages that fit", str(plan["num_pages_that_fit"])),
        (f"largest context with {slots} slots", f"{plan['largest_context']} tokens ({limit})"),
        (f"the {slots} slots of {context} tokens asked for", verdict),
    ]


def _time_rows(plan: dict[str, Any]) -> Rows:
    limits, slots, context = plan["roofline_s"], plan["num_slots"], plan["context_len"]
    step = limits["decode_step_all_slots"]
    return [
        (f"least time of an output token, 1 request at {context} tokens", _ms(limits["per_output_token_1_row"])),
        (f"least time of a step for {slots} requests at {context} tokens", _ms(step)),
        (f"most output tokens of {slots} such requests", f"{slots / step:.0f} a second"),
        (f"least time of a prompt token, prompt of {context}", _ms(limits["per_prefill_token"])),
    ]


def _compiled(compiled: dict[str, Any]) -> str:
    depths = compiled["layers_compiled"]
    how = f"all {depths[0]} layers compiled"
    if compiled["extrapolated"]:
        how = f"extrapolated from programs of {depths[0]} and {depths[1]} layers"
    columns = {
        "arguments by arithmetic": "arguments_by_arithmetic",
        "arguments": "arguments",
        "results": "results",
        "of those in place": "aliased",
        "temporaries": "temporaries",
        "all held at once": "peak",
    }
    rows = [["program, GB of each device", *columns], ["---", *["---:"] * len(columns)]]
    for name, program in compiled["programs"].items():
        rows.append([name, *(f"{program[key] / _GB:.3f}" for key in columns.values())])
    lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return (
        f"The CPU's compiler on virtual devices, {how}. Its arguments are those of every platform;\n"
        "its temporaries are not: it keeps bfloat16 and int8 arrays, the cache among them, widened beside them.\n\n"
        f"{lines}"
    )


def _table(rows: Rows) -> str:
    return "\n".join(["| | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in rows)])


def _size(num_bytes: int) -> str:
    unit, name = next(((u, n) for u, n in _UNITS if abs(num_bytes) >= u), (1, "bytes"))
    return f"{num_bytes / unit:.{0 if unit == 1 else 3}f} {name}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
