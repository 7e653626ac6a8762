"""Parts of decoder layers in published names, small: tensor name -> shape, below the layer's own path."""

H, V, LAYERS, HEADS, KV, DIM, EXPERTS, INNER, RANK, STREAMS = 32, 64, 2, 4, 2, 8, 4, 16, 16, 2

Shapes = dict[str, tuple[int, ...]]


def under(prefix: str, parts: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in parts.items()}


def norms(*names: str) -> Shapes:
    return {f"{name}.weight": (H,) for name in names or ("input_layernorm", "post_attention_layernorm")}


def linear(out: int, into: int = H, *, bias: bool = False) -> Shapes:
    return {"weight": (out, into)} | ({"bias": (out,)} if bias else {})


def gqa(*, bias: bool = False, qk: bool = False, gate: int = 1, kv: int = KV, root: str = "self_attn") -> Shapes:
    """Grouped-query attention; gate = 2 where q_proj makes the output gate, too (Qwen3-Next and later)."""
    sizes = {"q_proj": gate * HEADS * DIM, "k_proj": kv * DIM, "v_proj": kv * DIM}
    shapes = {
        f"{each}.{part}": shape for each, size in sizes.items() for part, shape in linear(size, bias=bias).items()
    }
    shapes["o_proj.weight"] = (H, HEADS * DIM)
    return under(root, shapes | ({"q_norm.weight": (DIM,), "k_norm.weight": (DIM,)} if qk else {}))


def mla(*, query_rank: bool = True, rope: int = DIM, root: str = "self_attn", out: str = "o_proj") -> Shapes:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); `rope` dimensions beside 8 without position."""
    query = {
        "q_a_proj.weight": (RANK, H),
        "q_a_layernorm.weight": (RANK,),
        "q_b_proj.weight": (HEADS * (8 + rope), RANK),
    }
    shapes: Shapes = query if query_rank else {"q_proj.weight": (HEADS * (8 + rope), H)}
    return under(root, shapes | {
        "kv_a_proj_with_mqa.weight": (RANK + rope, H), "kv_a_layernorm.weight": (RANK,),
        "kv_b_proj.weight": (HEADS * 16, RANK), f"{out}.weight": (H, HEADS * 8),
    })  # fmt: skip


def gdn(*, one: bool = False) -> Shapes:
    """Gated delta net; `one` where the inputs are two projections (Qwen3-Next) and not four (Qwen3.5)."""
    split = {"in_proj_qkv": 64, "in_proj_z": 32, "in_proj_a": 4, "in_proj_b": 4}
    inputs = {"in_proj_qkvz": 96, "in_proj_ba": 8} if one else split
    return under("linear_attn", {f"{name}.weight": (out, H) for name, out in inputs.items()} | {
        "A_log": (4,), "dt_bias": (4,), "conv1d.weight": (64, 1, 4), "norm.weight": (8,), "out_proj.weight": (H, 32),
    })  # fmt: skip


def kda(root: str, *, out: str = "o_proj", low: str = "f_a_proj f_b_proj g_a_proj g_b_proj") -> Shapes:
    """Kimi delta attention; `low` are its gates: in pairs of low rank, or whole."""
    gates = {name: (8, H) if "_a_" in name else (HEADS * DIM, 8 if "_b_" in name else H) for name in low.split()}
    shapes = {f"{name}.weight": shape for name, shape in gates.items()}
    shapes |= {f"{each}_proj.weight": (32, H) for each in "qkv"} | {
        f"{each}_conv1d.weight": (32, 1, 4) for each in "qkv"
    }
    return under(root, shapes | {
        "b_proj.weight": (HEADS, H), "A_log": (HEADS,), "dt_bias": (32,), "o_norm.weight": (DIM,),
        f"{out}.weight": (H, 32),
    })  # fmt: skip


def dense(root: str = "mlp", inner: int = 2 * H, *, names: str = "gate_proj up_proj down_proj") -> Shapes:
    *inward, outward = names.split()
    return under(root, {f"{name}.weight": (inner, H) for name in inward} | {f"{outward}.weight": (H, inner)})


def moe(
    *, bias: str = "gate.e_score_correction_bias", shared: str = "shared_experts", root: str = "mlp", gate: str = "gate"
) -> Shapes:
    """Experts one by one, a router, an optional correction bias and an optional shared expert."""
    shapes: Shapes = {f"{root}.{gate}.weight": (EXPERTS, H)} | ({f"{root}.{bias}": (EXPERTS,)} if bias else {})
    for expert in range(EXPERTS):
        shapes |= dense(f"{root}.experts.{expert}", INNER)
    return shapes | (dense(f"{root}.{shared}", INNER) if shared else {})


def fused(experts: Shapes) -> Shapes:
    """The same with all experts in two tensors, as transformers runs them."""
    rest = {name: shape for name, shape in experts.items() if ".experts." not in name}
    return rest | {"mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, H), "mlp.experts.down_proj": (EXPERTS, H, INNER)}


def lettered(shapes: Shapes, *, shared: bool = False) -> Shapes:
    """With w1, w2, w3 in place of gate, down and up, in the experts alone or in the shared one, too."""
    letters, out = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}, {}
    for name, shape in shapes.items():
        here = shared or ".experts." in name
        out[".".join(letters.get(part, part) if here else part for part in name.split("."))] = shape
    return out


INDEXER = under("self_attn.indexer", {
    "wq_b.weight": (32, RANK), "wk.weight": (16, H), "k_norm.weight": (16,), "k_norm.bias": (16,),
    "weights_proj.weight": (2, H),
})  # fmt: skip
DEEPSEEK = (norms() | mla() | dense(), norms() | mla() | moe())
SPARSE = (norms() | mla() | dense() | INDEXER, norms() | mla() | moe() | INDEXER)
GATED = norms() | gqa(qk=True, gate=2)
QWEN_MOE = moe(bias="", shared="shared_expert") | {"mlp.shared_expert_gate.weight": (1, H)}


def hyper(stem: str, *, width: int = STREAMS * (STREAMS + 2), scales: int = 3, joint: str = "_") -> Shapes:
    """Hyper-connections of one half of a layer: how the streams are mixed."""
    shapes: Shapes = {"fn": (width, STREAMS * H), "base": (width,), "scale": (scales,)}
    return {f"{stem}{joint}{name}": shape for name, shape in shapes.items()}


def collapse(stem: str) -> Shapes:
    return hyper(stem, width=STREAMS, scales=1)


def mixer(stem: str, *, inject: bool = True) -> Shapes:
    """Hyper-connections of qwen4_exp."""
    down, up = "input_mix_weight_down.weight", "input_mix_weight_up.weight"
    shapes: Shapes = {"hc_norm.weight": (64,), down: (8, 64), up: (64, 8)}
    return under(stem, shapes | ({"block_inject_weight.weight": (STREAMS, 64)} if inject else {}))


def deepseek_v4(*, indexed: bool, rate: int) -> Shapes:
    """One layer; rate = how many positions a compressed one stands for, 0 = no compression, as in the head."""
    attn: Shapes = {
        "attn_sink": (HEADS,), "wq_a.weight": (RANK, H), "q_norm.weight": (RANK,), "wq_b.weight": (HEADS * 16, RANK),
        "wkv.weight": (16, H), "kv_norm.weight": (16,), "wo_a.weight": (16, 32), "wo_b.weight": (H, 16),
    }  # fmt: skip
    width = 32 if indexed else 16
    part: Shapes = {"wkv.weight": (width, H), "wgate.weight": (width, H), "ape": (rate, width), "norm.weight": (16,)}
    attn |= under("compressor", part) if rate else {}
    if indexed:
        attn |= under("indexer", under("compressor", part) | {"wq_b.weight": (32, RANK), "weights_proj.weight": (2, H)})
    ffn = lettered(moe(root="ffn", bias="gate.bias"), shared=True)
    return under("attn", attn) | ffn | norms("attn_norm", "ffn_norm") | hyper("hc_attn") | hyper("hc_ffn")


def inkling(*, sparse: bool) -> Shapes:
    attn: Shapes = {
        "wq_du.weight": (32, H), "wk_dv.weight": (16, H), "wv_dv.weight": (16, H), "wr_du.weight": (16, H),
        "wo_ud.weight": (H, 32), "q_norm.weight": (DIM,), "k_norm.weight": (DIM,), "k_sconv.weight": (16, 1, 4),
        "v_sconv.weight": (16, 1, 4), "rel_logits_proj.proj": (4, 8),
    }  # fmt: skip
    mlp: Shapes = {"w13_dn.weight": (4 * H, H), "w2_md.weight": (H, 2 * H), "global_scale": (1,)}
    if sparse:
        mlp = {
            "experts.w13_weight": (EXPERTS, 2 * INNER, H), "experts.w2_weight": (EXPERTS, H, INNER),
            "shared_experts.shared_w13_weight": (1, 2 * INNER, H), "shared_experts.shared_w2_weight": (1, H, INNER),
            "gate.weight": (EXPERTS + 1, H), "gate.bias": (EXPERTS,), "gate.global_scale": (1,),
        }  # fmt: skip
    convolutions = {"attn_sconv.weight": (H, 1, 4), "mlp_sconv.weight": (H, 1, 4)}
    return under("attn", attn) | under("mlp", mlp) | convolutions | norms("attn_norm", "mlp_norm")


def gigachat(shapes: Shapes) -> Shapes:
    """Each norm over the hidden size, and those of the latent attention, with a gate of low rank."""
    gated = [(name.removesuffix(".weight"), *shape) for name, shape in shapes.items() if "norm" in name]
    up = {f"{name}.gate_up_projection.weight": (4, size) for name, size in gated}
    return shapes | up | {f"{name}.gate_down_projection.weight": (size, 4) for name, size in gated}
