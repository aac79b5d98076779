"""The contract of a kind of tier, as tests of the kind's tiers and of the ways in which users configure them.

Subclass `KindConformance` in a pytest module::

    class TestMyKind(KindConformance):
        settings = {"kind": "mine", "size": "16MiB"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from farpool.abc.tier import Tier
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.pool import Pool
from farpool.memory.tiers.kinds import load_kind, offers, tier_spec
from farpool.memory.tiers.spec import TierSpec
from farpool.testing.tier_conformance import TierConformance

__all__ = ["KindConformance"]


class KindConformance(TierConformance):
    """Tests of a kind of tier: a subclass gives `settings`, pytest runs the rest.

    Attributes
    ----------
    settings : mapping of str to object
        The kind and the settings of a tier of 8 MiB to 256 MiB, as a user writes them under ``[[pool.tiers]]`` in a
        TOML file.
    """

    settings: ClassVar[Mapping[str, object]]

    def make_spec(self) -> TierSpec:
        """Make the spec from `settings`."""
        return tier_spec(self.settings, "settings")

    def make_tier(self) -> Tier:
        """Make a new, closed tier from `settings`."""
        return self.make_spec().make()

    def test_one_entry_point_offers_the_kind(self) -> None:
        kind = self.settings["kind"]
        assert isinstance(kind, str)
        assert len(offers(kind)) == 1, f"expected one entry point, found {offers(kind)}"
        assert load_kind(kind, "kind") is type(self.make_spec())

    def test_specs_with_the_same_settings_are_equal_and_make_tiers_of_their_own(self) -> None:
        spec = self.make_spec()
        assert spec == self.make_spec()
        assert hash(spec) == hash(self.make_spec())
        assert spec.make() is not spec.make()
        assert spec.make().info.name == spec.name

    def test_a_file_and_the_program_give_equal_configurations(self) -> None:
        lines = [f"{name} = {json.dumps(value)}" for name, value in self.settings.items()]
        path = self.folder / "farpool.toml"
        path.write_text("\n".join(["[pool]", "fast = 4096", "[[pool.tiers]]", *lines, ""]))
        assert PoolConfig.from_toml(path) == PoolConfig.make(4096, [self.settings])
        assert PoolConfig.make(4096, [self.settings]).tiers == (self.make_spec(),)

    def test_the_short_form_is_equal_in_three_ways(self) -> None:
        spec = self.make_spec()
        if not spec.short_form:
            return
        value: Any = self.settings[spec.short_form]
        kind = type(spec).kind
        expected = PoolConfig.make(4096, [{"kind": kind, spec.short_form: value}])
        path = self.folder / "farpool.toml"
        path.write_text(f"[pool]\nfast = 4096\n{kind} = {json.dumps(value)}\n")
        text = value if isinstance(value, str) else json.dumps(value)
        variables = {"FARPOOL_FAST": "4096", f"FARPOOL_{kind.upper()}": text}
        short_form: dict[str, Any] = {kind: value}
        assert PoolConfig.make(4096, **short_form) == expected
        assert PoolConfig.from_toml(path) == expected
        assert PoolConfig.from_environment(variables) == expected

    def test_a_pool_shows_a_tier_of_the_kind(self) -> None:
        with Pool(fast=4096, tiers=[self.settings]) as pool:
            (tier,) = pool.stats().tiers
            assert (tier.name, tier.kind) == (self.make_spec().name, self.make_tier().info.kind)
            assert tier.capacity == self.make_tier().info.capacity
