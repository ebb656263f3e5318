/* Reads its request, answers with a plain result: what any tool costs at least. */
#include <stdio.h>
#include <unistd.h>

int main(void) {
    char buffer[65536];
    size_t total = 0;
    ssize_t got;
    while ((got = read(0, buffer, sizeof buffer)) > 0) total += (size_t)got;
    if (got < 0) return 2;
    printf("{\"bytes\":%zu}", total);
    return 0;
}
