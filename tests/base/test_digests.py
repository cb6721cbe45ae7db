"""Digests of user-supplied modules: they cover everything that a module imports from its own folder, nothing else."""

import importlib
import sys
from pathlib import Path

import pytest

from fedrema.base.digests import file_digest, module_digests

FILES = {
    "top_one.py": "import numpy\nfrom top_two import a\nimport fedrema\n",
    "top_two.py": "def later():\n    from package_x.inner import deep\na = 1\n",
    "package_x/__init__.py": "from . import sibling\n",
    "package_x/sibling.py": "",
    "package_x/inner/__init__.py": "from ..cousin import value\n",
    "package_x/inner/deep.py": "import top_one\n",
    "package_x/cousin.py": "value = 1\n",
    "package_x/unused.py": "",
    "namespace_x/inner/deep.py": "from .beside import value\nimport namespace_x.inner.further\n",
    "namespace_x/inner/beside.py": "value = 1\n",
    "namespace_x/inner/further/__init__.py": "",
    "unrelated.py": "",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("top_one", "top_two", "package_x")]:
        del sys.modules[name]


def test_digests_cover_all_imports_from_the_modules_folder_without_executing_it(folder):
    (folder / "top_two.py").write_text(FILES["top_two.py"] + "raise SystemExit\n")
    found = module_digests("top_one")
    unused = ("package_x/unused.py", "unrelated.py")
    assert sorted(found) == sorted(name for name in FILES if name not in unused and "namespace" not in name)
    assert found["package_x/cousin.py"] == file_digest(folder / "package_x" / "cousin.py")
    assert not {"top_one", "top_two", "package_x"} & set(sys.modules)


def test_folders_without_an_init_file_are_packages_too(folder):
    assert sorted(module_digests("namespace_x.inner.deep")) == sorted(name for name in FILES if "namespace" in name)


@pytest.mark.parametrize("name", ["top_one.py", "top_two.py", "package_x/sibling.py", "package_x/inner/__init__.py"])
def test_a_change_in_any_imported_file_changes_its_digest(folder, name):
    before = module_digests("top_one")
    (folder / name).write_text(FILES[name] + "b = 2\n")
    after = module_digests("top_one")
    assert [each for each in after if after[each] != before[each]] == [name]


def test_files_that_are_not_imported_have_no_digest(folder):
    before = module_digests("top_one")
    (folder / "unrelated.py").write_text("other = 1\n")
    (folder / "package_x" / "unused.py").write_text("other = 1\n")
    assert module_digests("top_one") == before


def test_the_digest_of_an_imported_module_is_of_the_version_in_memory(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("package_x.cousin")
    before = module_digests("package_x.cousin")
    (folder / "package_x" / "cousin.py").write_text("value = 22\n")
    assert module_digests("package_x.cousin") == before
    importlib.reload(sys.modules["package_x.cousin"])
    assert module_digests("package_x.cousin") != before


def test_digests_of_an_installed_module_cover_only_its_own_package():
    found = module_digests("pooch")
    assert found
    assert {Path(name).parts[0] for name in found} == {"pooch"}
    assert module_digests("fedrema.models.networks") == module_digests("is_nowhere_to_be_found") == {}
