"""A hash trace of (tokens, routes) from the rollout engine to the routers.

The engine hashes a sample's tokens and routes when it returns them (`RouteRef`). The same hashes
are computed here from the tokens and experts that the routers used, in the order of the sample.
Equal hashes show that transport, slicing, packing and schedule did not change them."""

from collections.abc import Sequence

from torch import Tensor

from rltrain.batch import RouteRef, SampleRoutes
from rltrain.routing.codec import route_checksum, token_checksum
from rltrain.routing.objects import block_layers


def check_refs(
    samples: Sequence[SampleRoutes], tokens: Sequence[Tensor], weight_versions: Tensor | None
) -> None:
    """Check that the routes of every sample were captured for its tokens and weight version.

    Args:
        tokens: tokens of each sample  # [tokens]
        weight_versions: version of the weights that sampled its last token, if known  # [B]

    Raises:
        RuntimeError: naming sample and engine.
    """
    for number, (refs, sample_tokens) in enumerate(zip(samples, tokens, strict=True)):
        for ref in refs:
            where = f"sample {number}, routes {_described(ref)}"
            if token_checksum(_part(sample_tokens, ref, 1).numpy()) != ref.token_checksum:
                raise RuntimeError(
                    f"{where}: they were captured for other tokens than the sample has [RL5007]"
                )
        rows = sum(ref.rows for ref in refs)
        if rows != len(sample_tokens) - 1:
            raise RuntimeError(
                f"sample {number}: expected {len(sample_tokens) - 1} rows of routes for "
                f"{len(sample_tokens)} tokens, found {rows} [RL5007]"
            )
        if weight_versions is not None and int(weight_versions[number]) != ref.weight_version:
            raise RuntimeError(
                f"{where}: its tokens were sampled at weight version {int(weight_versions[number])}"
                " [RL5007]"
            )


def check_trace(
    samples: Sequence[SampleRoutes],
    read: Sequence[Tensor],
    used: Sequence[Tensor],
    stored: Sequence[Tensor],
    layers: Sequence[int],
    when: str,
    repeated: Sequence[Tensor] | None = None,
) -> int:
    """Compare what the routers of ``layers`` did with what the engine sent.

    Args:
        read: per sample, the tokens that the rows read  # [tokens]
        used: per sample, the experts that the rows used  # [tokens, len(layers), K]
        stored: per sample, the fetched experts. They replace ``used`` in rows without a captured
            route, where the routers chose the experts  # [tokens, len(layers), K]
        when: name of the pass, for the error
        repeated: per sample, the experts that an earlier pass recorded and that rows without a
            captured route must repeat; None: these rows choose freely  # [tokens, len(layers), K]

    Returns:
        Number of compared hashes. Blocks of which ``layers`` hold only a part are not compared.

    Raises:
        RuntimeError: naming sample, layers and pass.
    """
    compared = 0
    for number, refs in enumerate(samples):
        for ref in refs:
            where = f"{when}, sample {number} {_described(ref)}"
            compared += _check_part(
                ref,
                _part(read[number], ref, 1),
                _part(used[number], ref),
                _part(stored[number], ref),
                layers,
                where,
                None if repeated is None else _part(repeated[number], ref),
            )
    return compared


def _check_part(
    ref: RouteRef,
    read: Tensor,
    used: Tensor,
    stored: Tensor,
    layers: Sequence[int],
    where: str,
    repeated: Tensor | None,
) -> int:
    """See `check_trace`, of the rows of one reference and the tokens that they read."""
    if token_checksum(read.numpy()) != ref.token_checksum:
        raise RuntimeError(f"{where}: the routers read other tokens than the engine [RL5007]")
    rows = used.clone()
    for start, end in ref.missing:
        span = slice(start - ref.first_row, end - ref.first_row)
        if repeated is not None and not rows[span].equal(repeated[span]):
            raise RuntimeError(
                f"{where}, rows {start} to {end - 1}: they have no captured route, and the "
                "routers used other experts than the log-probability pass recorded"
                " [RL5007]"
            )
        rows[span] = stored[span]
    compared = 1
    for block, held in enumerate(block_layers(ref)):
        if not set(held) <= set(layers):
            continue
        used_checksum = route_checksum(rows[:, [layers.index(layer) for layer in held]].numpy())
        if used_checksum != ref.checksums[block]:
            raise RuntimeError(
                f"{where}, layers {list(held)}: the routers used other experts than the engine "
                f"captured (checksum {used_checksum:#010x}, not {ref.checksums[block]:#010x})"
                " [RL5007]"
            )
        compared += 1
    return compared


def _part(of_sample: Tensor, ref: RouteRef, more: int = 0) -> Tensor:
    """The rows of a reference, and ``more`` after them, of a tensor over the sample's tokens."""
    return of_sample[ref.first_row : ref.first_row + ref.rows + more]


def _described(ref: RouteRef) -> str:
    turn = f" from row {ref.first_row} on" if ref.first_row else ""
    return f"by {ref.producer} at weight version {ref.weight_version}{turn}"
