"""A hash trace of (tokens, routes) from the rollout engine to the routers.

The engine hashes a sample's tokens and routes when it returns them (`RouteRef`). The same hashes
are computed here from the tokens and experts that the routers used, in the order of the sample.
Equal hashes show that transport, slicing, packing and schedule did not change them."""

from collections.abc import Sequence

from torch import Tensor

from rltrain.batch import RouteRef
from rltrain.routing.codec import route_checksum, token_checksum
from rltrain.routing.objects import block_layers


def check_refs(
    refs: Sequence[RouteRef], tokens: Sequence[Tensor], weight_versions: Tensor | None
) -> None:
    """Check that the routes of every sample were captured for its tokens and weight version.

    Args:
        tokens: tokens of each sample  # [tokens]
        weight_versions: version of the weights that sampled them, if known  # [B]

    Raises:
        RuntimeError: naming sample and engine.
    """
    for number, (ref, sample_tokens) in enumerate(zip(refs, tokens, strict=True)):
        where = f"sample {number}, routes by {ref.producer} at weight version {ref.weight_version}"
        if token_checksum(sample_tokens.numpy()) != ref.token_checksum:
            raise RuntimeError(
                f"{where}: they were captured for other tokens than the sample has [RL5007]"
            )
        if weight_versions is not None and int(weight_versions[number]) != ref.weight_version:
            raise RuntimeError(
                f"{where}: its tokens were sampled at weight version {int(weight_versions[number])}"
                " [RL5007]"
            )


def check_trace(
    refs: Sequence[RouteRef],
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
    for number, (ref, tokens, experts, fetched) in enumerate(
        zip(refs, read, used, stored, strict=True)
    ):
        where = f"{when}, sample {number} by {ref.producer} at weight version {ref.weight_version}"
        if token_checksum(tokens.numpy()) != ref.token_checksum:
            raise RuntimeError(f"{where}: the routers read other tokens than the engine [RL5007]")
        rows = experts[: ref.rows].clone()
        for start, end in ref.missing:
            if repeated is not None and not rows[start:end].equal(repeated[number][start:end]):
                raise RuntimeError(
                    f"{where}, rows {start} to {end - 1}: they have no captured route, and the "
                    "routers used other experts than the log-probability pass recorded"
                    " [RL5007]"
                )
            rows[start:end] = fetched[start:end]
        compared += 1
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
