"""The program's first moments."""

import sys

import pytest

from tonnage import __main__ as program


def test_an_interrupt_while_it_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        """Finds nothing, and is interrupted at it."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "tonnage.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tonnage.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted.\n"
