#!/bin/sh
# The request holds the call's id, so that the file is another one each time.
cat > changed
echo '{"n":1}'
