#!/bin/sh
# A tool in plain shell. The input schema allows only names without quotes and backslashes, so grep can read the request.
exec 3>&1 1>&2 # descriptor 3 is the reply; whatever else prints goes to the log

request=$(cat)
field() { # the first string member named $1: those of the request stand before whatever else it may hold
    printf '%s' "$request" | grep -o "\"$1\"[[:space:]]*:[[:space:]]*\"[^\"]*\"" | head -n 1 | sed 's/.*"\([^"]*\)"$/\1/'
}
call_id=$(field call_id)

succeed() {
    printf '{"protocol":1,"call_id":"%s","ok":true,"result":%s}\n' "$call_id" "$1" >&3
    exit 0
}
fail() {
    printf '{"protocol":1,"call_id":"%s","ok":false,"error":{"code":"%s","message":"%s"}}\n' "$call_id" "$1" "$2" >&3
    exit 1
}

case $(field operation) in
call) ;;
describe) succeed '{"name":"line_count","version":"1.0"}' ;;
health) succeed '{"healthy":true}' ;;
*) fail UNSUPPORTED 'this tool knows call, describe and health' ;;
esac

path=$(field path)
[ -f "$path" ] && [ -r "$path" ] || fail NO_SUCH_FILE "there is no readable file $path in the workspace"
set -- $(wc -lwc <"$path")
succeed "{\"lines\":$1,\"words\":$2,\"bytes\":$3}"
