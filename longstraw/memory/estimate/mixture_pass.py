"""What a mixture of experts allocates on the CUDA path: see ``passes``. Tokens travel to the experts and back."""

from __future__ import annotations

from longstraw.config.architectures import Glm52Config
from longstraw.memory.estimate.ledger import Held
from longstraw.memory.estimate.passes import Pass, Saved


class MixturePass(Pass):
    """Experts of which each rank has some, beside one that every token sees."""

    @property
    def model(self) -> Glm52Config:
        model = self.layout.config.model
        assert isinstance(model, Glm52Config)
        return model

    @property
    def entries(self) -> int:
        """Pairs of a token here and an expert."""
        return self.piece.t * self.model.num_experts_per_tok

    @property
    def received(self) -> int:
        """Those that come to this rank's experts."""
        ep = self.layout.sizes.ep
        return self.entries if ep == 1 else round(self.entries * self.layout.config.simulation.imbalance)

    def mixture(self, h: Held, saved: Saved | None) -> Held:
        """What experts and the shared one make of ``h``."""
        t, d, w, f = self.piece.t, self.d, self.w, self.f
        model, one = self.model, self.received // max(self.own_experts, 1)
        self.spike("router", (t + model.n_routed_experts) * d * f)
        sent = self.take("entries", self.entries * d * w)
        given = self.take("entries", self.received * d * w, "communication")
        self.drop(sent)
        by_expert = self.take("entries", self.received * d * w)
        out = self.take("made", self.received * d * f)
        self.spike("expert", one * (3 * model.moe_intermediate_size * w + d * (2 * w + 2 * f)))
        made = self.take("made", self.received * d * w)
        self.drop(out)
        if saved is None:
            self.drop(by_expert)
        else:
            saved.keep("experts", by_expert)
        back = self.take("back", self.received * d * w, "communication")
        returned = self.take("back", self.entries * d * w, "communication")
        self.drop(back)
        zeros, wide = self.take("sum", t * d * f), self.take("sum", self.entries * d * f)
        added = self.take("sum", t * d * f)
        self.drop(zeros, wide)
        routed = self.take("sum", t * d * w)
        self.drop(added, made, given, returned)
        inner = model.moe_intermediate_size * model.n_shared_experts
        shared = self.swiglu(inner, h, saved, "mlp.shared_experts.")
        both = self.take("sum", t * d * w)
        self.drop(routed, shared)
        return both

    @property
    def own_experts(self) -> int:
        return self.model.n_routed_experts // self.layout.sizes.ep

    def mixture_backward(self, saved: Saved) -> Held:
        model, d, w, f = self.model, self.d, self.w, self.f
        inner, one = model.moe_intermediate_size, self.received // max(self.own_experts, 1)
        by_shared = self.swiglu_backward(inner * model.n_shared_experts, saved, "mlp.shared_experts.")
        wide = self.take("of sum", self.entries * d * f)
        narrow = self.take("of sum", self.entries * d * w, "communication")
        self.drop(wide)
        came = self.take("of made", self.received * d * w, "communication")
        self.drop(narrow)
        zeros, made = self.take("of made", self.received * d * w), self.take("of made", self.received * d * w)
        self.drop(zeros, came)
        of_given = self.take("of entries", self.received * d * f)
        learnt = self.take("of experts", 3 * self.own_experts * inner * d * w if self.every else 0)
        self.spike("expert", one * (8 * inner * w + d * (3 * w + f)))
        given = self.take("of entries", self.received * d * w)
        self.drop(of_given, *saved.pop("experts"), made)
        sorted_back = [self.take("of entries", self.received * d * w) for _ in range(2)]
        self.drop(sorted_back[0], given, learnt)
        back = self.take("of entries", self.entries * d * w, "communication")
        self.drop(sorted_back[1])
        self.spike("of entries", self.piece.t * d * w)
        self.drop(back)
        return by_shared
