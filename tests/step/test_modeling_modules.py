"""The modules with the code of a network."""

import importlib.util

from tonnage.step import modeling_modules


def test_types_that_share_a_folder_name_the_code_in_it() -> None:
    assert modeling_modules.list_modules({"model_type": "gemma3_text"}) == (
        "transformers.models.gemma3.modeling_gemma3",
    )
    assert importlib.util.find_spec(*modeling_modules.list_modules({"model_type": "gemma3_text"})) is not None


def test_networks_of_a_network_are_among_them_once() -> None:
    part = {"model_type": "siglip_vision_model"}
    named = modeling_modules.list_modules(
        {"model_type": "gemma3", "vision_config": part, "other_config": part, "text_config": {}}
    )
    assert named == ("transformers.models.gemma3.modeling_gemma3", "transformers.models.siglip.modeling_siglip")


def test_what_is_no_name_of_a_module_is_left_out() -> None:
    assert modeling_modules.list_modules({"model_type": "../../evil"}) == ()
    assert modeling_modules.list_modules({}) == ()
