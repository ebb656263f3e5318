#!/bin/sh
# Compiles the library and its tests into a temporary folder and runs them: ./test.sh
set -eu
cd "$(dirname "$0")"
classes=$(mktemp -d)
trap 'rm -rf "$classes"' EXIT
find src -name '*.java' -exec javac -encoding UTF-8 --release 17 -Xlint:all -Werror -d "$classes" {} +
java -Dfile.encoding=UTF-8 -cp "$classes" dev.agentd.tool.ToolTest
