#!/bin/sh
sleep 0.3
echo '{"n":1}'
