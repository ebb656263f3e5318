/* A tool in plain C: reads one JSON object from stdin, writes one to stdout, exits with 0 or 1.
 *
 *     cc -O2 -Wall -Wextra -o checksum checksum.c
 *
 * It looks for the members that it needs and relies on agentd having checked the arguments: the input schema allows no
 * quotes and no backslashes in the path. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_REQUEST = 1 << 20 };

static char request[MAX_REQUEST + 1];

/* Copies the string member of this name; an empty string when there is none. */
static void member(const char *name, char *to, size_t size) {
    char key[64];
    const char *at;
    size_t length;

    snprintf(key, sizeof key, "\"%s\"", name);
    to[0] = '\0';
    at = strstr(request, key);
    if (at == NULL) return;
    at += strlen(key);
    at += strspn(at, " \t\r\n:");
    if (*at != '"') return;
    at++;
    length = strcspn(at, "\"");
    if (length >= size) return;
    memcpy(to, at, length);
    to[length] = '\0';
}

static void reply(const char *call_id, int ok, const char *body) {
    printf("{\"protocol\":1,\"call_id\":\"%s\",\"ok\":%s,%s}\n", call_id, ok ? "true" : "false", body);
    exit(fflush(stdout) == 0 && ok ? 0 : 1);
}

int main(void) {
    char call_id[32], operation[32], path[256], body[512];
    unsigned char block[65536];
    uint32_t crc = 0xffffffffu;
    unsigned long long bytes = 0;
    size_t length, index;
    FILE *file;

    length = fread(request, 1, MAX_REQUEST, stdin);
    request[length] = '\0';
    member("call_id", call_id, sizeof call_id);
    member("operation", operation, sizeof operation);
    if (strcmp(operation, "describe") == 0) reply(call_id, 1, "\"result\":{\"name\":\"checksum\",\"version\":\"1.0\"}");
    if (strcmp(operation, "health") == 0) reply(call_id, 1, "\"result\":{\"healthy\":true}");
    if (strcmp(operation, "call") != 0)
        reply(call_id, 0, "\"error\":{\"code\":\"UNSUPPORTED\",\"message\":\"this tool knows call, describe and health\"}");

    member("path", path, sizeof path);
    file = fopen(path, "rb");
    if (file == NULL) {
        snprintf(body, sizeof body,
                 "\"error\":{\"code\":\"NO_SUCH_FILE\",\"message\":\"there is no readable file %s in the workspace\"}", path);
        reply(call_id, 0, body);
    }
    while ((length = fread(block, 1, sizeof block, file)) > 0) {
        bytes += length;
        for (index = 0; index < length; index++) {
            int bit;
            crc ^= block[index];
            for (bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1u)));
        }
    }
    if (ferror(file)) reply(call_id, 0, "\"error\":{\"code\":\"READ_FAILED\",\"message\":\"the file cannot be read to its end\"}");
    snprintf(body, sizeof body, "\"result\":{\"crc32\":\"%08x\",\"bytes\":%llu}", (unsigned)(crc ^ 0xffffffffu), bytes);
    reply(call_id, 1, body);
    return 1;
}
