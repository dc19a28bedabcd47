from __future__ import annotations

import pytest

from megatron_infer.utils.attributes import replaced


class Settings:
    of_class = 1

    def __init__(self):
        self.own = 2

    def __setattr__(self, name, value):
        if name == "refused":
            raise ValueError("refused")
        super().__setattr__(name, value)


def test_attributes_are_as_before_after_an_error_and_where_one_cannot_be_set():
    settings = Settings()
    with pytest.raises(KeyError), replaced(settings, own=3, of_class=4, new=5):
        assert (settings.own, settings.of_class, settings.new) == (3, 4, 5)
        raise KeyError
    assert vars(settings) == {"own": 2} and settings.of_class == 1
    with pytest.raises(ValueError, match="refused"), replaced(settings, own=3, new=5, refused=6):
        pass
    assert vars(settings) == {"own": 2}


def test_an_attribute_of_a_class_is_replaced_for_all_its_objects():
    with replaced(Settings, of_class=7):
        assert Settings().of_class == 7
    assert Settings().of_class == 1
