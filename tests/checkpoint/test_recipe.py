"""Recipes: an error names the path of the invalid key."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron_merging.checkpoint import recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raito: 0.3", "unknown key 'raito' (at r.yaml: raito). Did you mean ratio"),
        ("round-to: 8", "Did you mean round_to"),
        ("ratio: lots", "(at r.yaml: ratio). ratio is a number."),
        ("layer: {layer1: much}", "(at r.yaml: layer.layer1)"),
        ("layer: 0.5", "(at r.yaml: layer)"),
        ("layer: {1: 0.5}", "Put it in quotes"),
        ("ignore: [fc, 3]", "(at r.yaml: ignore[1])"),
        ("overwrite: 3", "true or false"),
        ("ratio: [1", "not YAML"),
        ("- ratio", "expected keys and values, got list"),
    ],
)
def test_recipes_are_refused_with_the_path_of_the_key(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(text)
    with pytest.raises(recipe.RecipeError) as caught:
        recipe.resolve_recipe("r.yaml", {})
    assert message in str(caught.value)
