"""A pytest plugin: the tests of this run compile and use kernels that check themselves for errors."""

from __future__ import annotations

from shapeshift.kernels import kernel_build

# -O1, since the compiler may remove an error together with the code around it.
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

# A part of the libraries' names: they lie beside those without checks.
kernel_build._FLAGS = (*kernel_build._FLAGS, *FLAGS)  # type: ignore[assignment]
# Of one compiler call: the checks make it several times longer, and other work longer still.
kernel_build._TIMEOUT_S = 3600.0
