# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# The new operation runs on every device that runs decoder operations.
compile unit.ops
"$build/tests/unit.ops" toy_reverse_test.cc
