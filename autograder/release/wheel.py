"""Wheels without tests, and without the mutants and alternatives of each chapter."""

from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copy every module into a wheel except those that test the grading itself."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package: its name, the module's, and the file."""
        modules = super().find_package_modules(package, package_dir)
        left_out = ("mutant", "mutants", "alternatives", "conftest")
        return [module for module in modules if module[1] not in left_out and not module[1].endswith("_test")]
