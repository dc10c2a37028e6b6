"""What a configuration needs, computed before anything starts: placement, memory, FLOPs. Pure.

Read `plan_text` first: it composes what `rltrain plan` prints. `placement` decides where ranks go;
`policy_memory` and `engine_memory` are the arithmetic, `roofline` the limits of a card.
"""
