/* What the kernel alone takes for a launch of `true` under the policy `strict`: each operation with the fewest system calls that
 * it can be done with, and all of them as one launch.
 *
 *   floor alone CGROUP ROUNDS BIND...              p50 of each operation in nanoseconds, less what it has in common with others
 *   floor together CGROUP WORKERS EACH BIND...     launches per second of so many processes at once
 *
 * CGROUP is an empty cgroup v2 directory of the caller's, BIND what the sandbox sees of the host. Prints one JSON object. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <spawn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define PROGRAM "/usr/bin/true"
/* A user that owns nothing. */
#define NOBODY 65534
#define NAMESPACES (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET)

static void fail_with(int error, const char *what) {
    fprintf(stderr, "floor: %s: %s\n", what, strerror(error));
    _exit(1);
}

static void fail(const char *what) { fail_with(errno, what); }

static long check(long result, const char *what) {
    if (result == -1) fail(what);
    return result;
}

/* --- What is decided before anything is measured --- */

/* Directories that every sandbox has a Landlock rule for, besides those of its binds that do not lie in one of them. /home
 * stands for the workspace, which hosts have not. */
static const char *const RULED[] = {"/", "/etc", "/proc", "/sys", "/var", "/run", "/home", "/tmp", "/dev/shm", "/dev"};

struct shown {
    const char *path;
    int is_directory;
};

/* Binds, and what has a rule. */
static struct shown *binds, *rules;
static size_t bind_count, rule_count;
/* Directories and links of the host that the new root needs before anything can be bound there, in their order. */
static char *parents[256];
static size_t parent_count;
static const char *const LINKS[] = {"/bin", "/sbin", "/lib", "/lib64"};
static char link_targets[COUNT(LINKS)][256];

static int is_directory(const char *path) {
    struct stat found;
    check(stat(path, &found), path);
    return S_ISDIR(found.st_mode);
}

static void need_parents_of(const char *path) {
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        char *parent = strndup(path + 1, (size_t)(slash - path - 1));
        size_t known = 0;
        while (known < parent_count && strcmp(parents[known], parent)) known++;
        if (known < parent_count) {
            free(parent);
        } else {
            if (parent_count == COUNT(parents)) fail_with(E2BIG, path);
            parents[parent_count++] = parent;
        }
    }
}

/* A rule holds for all that lies below. What lies in / is only listed by its rule. */
static int has_rule_above(const char *path) {
    for (size_t i = 1; i < COUNT(RULED); i++) {
        size_t length = strlen(RULED[i]);
        if (!strncmp(path, RULED[i], length) && path[length] == '/') return 1;
    }
    return 0;
}

static void plan(char **paths, size_t count) {
    bind_count = count;
    binds = calloc(count, sizeof *binds);
    rules = calloc(COUNT(RULED) + count, sizeof *rules);
    if (!binds || !rules) fail("calloc");
    for (size_t i = 0; i < COUNT(RULED); i++) rules[rule_count++] = (struct shown){RULED[i], 1};
    for (size_t i = 0; i < count; i++) {
        need_parents_of(paths[i]);
        binds[i] = (struct shown){paths[i], is_directory(paths[i])};
        if (!has_rule_above(paths[i])) rules[rule_count++] = binds[i];
    }
    /* Where one is no link, it is among the binds or not there. */
    for (size_t i = 0; i < COUNT(LINKS); i++)
        if (readlink(LINKS[i], link_targets[i], sizeof link_targets[i] - 1) == -1) *link_targets[i] = 0;
}

/* --- The operations of the child --- */

static void namespaces(void) {
    check(unshare(NAMESPACES), "unshare");
    struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int any = (int)check(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket");
    check(ioctl(any, SIOCSIFFLAGS, &loopback), "loopback");
}

static void mount_namespace(void) { check(unshare(CLONE_NEWNS), "unshare"); }

static void devices(void) {
    static const struct {
        const char *path;
        unsigned major, minor;
    } NODES[] = {{"dev/null", 1, 3},   {"dev/zero", 1, 5},    {"dev/full", 1, 7},
                 {"dev/random", 1, 8}, {"dev/urandom", 1, 9}, {"dev/tty", 5, 0}};
    static const char *const DEVICE_LINKS[][2] = {{"/proc/self/fd", "dev/fd"},
                                                  {"/proc/self/fd/0", "dev/stdin"},
                                                  {"/proc/self/fd/1", "dev/stdout"},
                                                  {"/proc/self/fd/2", "dev/stderr"},
                                                  {"pts/ptmx", "dev/ptmx"}};
    check(mount("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k"), "dev");
    for (size_t i = 0; i < COUNT(NODES); i++)
        check(mknod(NODES[i].path, S_IFCHR | 0666, makedev(NODES[i].major, NODES[i].minor)), NODES[i].path);
    for (size_t i = 0; i < COUNT(DEVICE_LINKS); i++)
        check(symlink(DEVICE_LINKS[i][0], DEVICE_LINKS[i][1]), DEVICE_LINKS[i][1]);
    check(mkdir("dev/pts", 0755), "dev/pts");
    check(mkdir("dev/shm", 0755), "dev/shm");
    check(mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "ptmxmode=0666,mode=0600"), "devpts");
    check(mount("tmpfs", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m"), "dev/shm");
}

/* In a mount namespace of its own. */
static void mounts(void) {
    static const char *const PLACES[] = {"proc", "sys", "var", "run", "home", "tmp", "dev"};
    umask(0);
    check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "making mounts private");
    check(mount("tmpfs", "/proc", "tmpfs", MS_NOSUID, "mode=0755,size=16m"), "root");
    check(chdir("/proc"), "chdir");
    for (size_t i = 0; i < COUNT(PLACES); i++) check(mkdir(PLACES[i], 0755), PLACES[i]);
    for (size_t i = 0; i < parent_count; i++) check(mkdir(parents[i], 0755), parents[i]);
    for (size_t i = 0; i < COUNT(LINKS); i++)
        if (*link_targets[i]) check(symlink(link_targets[i], LINKS[i] + 1), LINKS[i]);
    for (size_t i = 0; i < bind_count; i++) {
        const char *path = binds[i].path, *place = path + 1;
        int tree = (int)check(open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE), path);
        check(binds[i].is_directory ? mkdir(place, 0755) : mknod(place, S_IFREG | 0444, 0), place);
        check(move_mount(tree, "", AT_FDCWD, place, MOVE_MOUNT_F_EMPTY_PATH), place);
    }
    /* Once for all that was bound, before there is anything that may be written. */
    struct mount_attr read_only = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
    check(mount_setattr(AT_FDCWD, ".", AT_RECURSIVE, &read_only, sizeof read_only), "mount_setattr");
    devices();
    check(mount("proc", "proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2"), "proc");
    check(mount("tmpfs", "tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=256m"), "tmp");
    check(syscall(SYS_pivot_root, ".", "."), "pivot_root");
    check(umount2(".", MNT_DETACH), "detaching the old root");
    check(chdir("/"), "chdir");
}

/* A change of uid empties the effective and permitted sets; the bounding set may be emptied by the launcher, once for all. */
static void identity(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {0};
    check(setsid(), "setsid");
    check(syscall(SYS_setgroups, 0, NULL), "setgroups");
    check(syscall(SYS_setresgid, NOBODY, NOBODY, NOBODY), "setresgid");
    check(syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY), "setresuid");
    check(syscall(SYS_capset, &header, none), "capset");
    check(prctl(PR_SET_PDEATHSIG, SIGKILL), "death signal");
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
}

/* linux/landlock.h of the host may be older than its kernel. */
struct ruleset {
    uint64_t files, network, scopes;
};
struct __attribute__((packed)) beneath {
    uint64_t access;
    int32_t directory;
};
enum { EXECUTE = 1 << 0, READ_FILE = 1 << 2, READ_DIRECTORY = 1 << 3 };
static long landlock_version;

static void landlock(void) {
    long version = landlock_version;
    struct ruleset handled = {
        .files = (1u << (version < 2 ? 13 : version < 3 ? 14 : version < 5 ? 15 : 16)) - 1, .network = 3, .scopes = 3};
    size_t size = version < 4 ? 8 : version < 6 ? 16 : 24;
    int ruleset = (int)check(syscall(SYS_landlock_create_ruleset, &handled, size, 0), "landlock_create_ruleset");
    for (size_t i = 0; i < rule_count; i++) {
        struct beneath allowed = {.access = EXECUTE | READ_FILE | (rules[i].is_directory ? READ_DIRECTORY : 0)};
        allowed.directory = (int32_t)check(open(rules[i].path, O_PATH | O_CLOEXEC), rules[i].path);
        check(syscall(SYS_landlock_add_rule, ruleset, 1, &allowed, 0), rules[i].path);
    }
    check(syscall(SYS_landlock_restrict_self, ruleset, 0), "landlock_restrict_self");
}

/* The filter of `strict`: a head, a search by halves between so many borders, then the calls whose arguments matter, one after
 * the other. What it decides makes no difference to the kernel that takes it in, so this one allows everything. */
enum { BORDERS = 80, CONDITIONS = 25 };
static struct sock_filter filter[512];
static unsigned short filter_length;

static void emit(unsigned short code, unsigned char if_true, unsigned char if_false, unsigned value) {
    filter[filter_length++] = (struct sock_filter){code, if_true, if_false, value};
}

/* The search between the borders `first` to `last`: two instructions for each border and one more, of which `behind` follow. */
static void emit_search(unsigned first, unsigned last, unsigned behind) {
    if (first == last) {
        if (first % 2)
            emit(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
        else
            emit(BPF_JMP | BPF_JA, 0, 0, behind);
        return;
    }
    unsigned middle = first + (last - first) / 2, lower = 2 * (middle - first) + 1, upper = 2 * (last - middle - 1) + 1;
    emit(BPF_JMP | BPF_JGE | BPF_K, (unsigned char)lower, 0, 5 * middle);
    emit_search(first, middle, upper + behind);
    emit_search(middle + 1, last, behind);
}

static void compile_filter(void) {
    const unsigned number = offsetof(struct seccomp_data, nr), first_argument = offsetof(struct seccomp_data, args);
    emit(BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, arch));
    emit(BPF_JMP | BPF_JEQ | BPF_K, 1, 1, 0);
    emit(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
    emit(BPF_LD | BPF_W | BPF_ABS, 0, 0, number);
    for (unsigned unknown = 0; unknown < 2; unknown++) {
        emit(BPF_JMP | BPF_JGE | BPF_K, 0, 1, 0x40000000 + unknown);
        emit(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
    }
    emit_search(0, BORDERS, 0);
    emit(BPF_LD | BPF_W | BPF_ABS, 0, 0, number);
    for (unsigned condition = 0; condition < CONDITIONS; condition++) {
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 4, 500 + condition);
        emit(BPF_LD | BPF_W | BPF_ABS, 0, 0, first_argument);
        emit(BPF_ALU | BPF_AND | BPF_K, 0, 0, 0xf000);
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0);
        emit(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
        emit(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
    }
    emit(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
}

static void seccomp(void) {
    struct sock_fprog program = {filter_length, filter};
    check(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program), "seccomp");
}

/* --- Children, and cgroups --- */

static void nothing(void) {}

static void namespace_and_mounts(void) {
    mount_namespace();
    mounts();
}

static void everything(void) {
    namespaces();
    mounts();
    identity();
    landlock();
    seccomp();
    execl(PROGRAM, PROGRAM, NULL);
    fail(PROGRAM);
}

static void wait_for(pid_t child) {
    int status;
    check(waitpid(child, &status, 0), "waitpid");
    if (status) fail_with(ECHILD, "a child failed");
}

static pid_t born(uint64_t flags, int cgroup, void (*work)(void)) {
    struct clone_args birth = {.flags = flags, .exit_signal = SIGCHLD, .cgroup = (uint64_t)cgroup};
    pid_t child = (pid_t)check(syscall(SYS_clone3, &birth, sizeof birth), "clone3");
    if (child) return child;
    work();
    _exit(0);
}

static void child(void (*work)(void)) { wait_for(born(0, 0, work)); }

/* The call's cgroup and the one above it, relative to the caller's. */
struct leaf {
    char slice[32], call[48];
};
static int cgroups;

static struct leaf leaf_of(unsigned worker) {
    struct leaf leaf;
    snprintf(leaf.slice, sizeof leaf.slice, "agent-%u.slice", worker);
    snprintf(leaf.call, sizeof leaf.call, "%s/call-1", leaf.slice);
    return leaf;
}

static void make(const struct leaf *leaf) {
    check(mkdirat(cgroups, leaf->slice, 0755), leaf->slice);
    check(mkdirat(cgroups, leaf->call, 0755), leaf->call);
}

static int opened(const struct leaf *leaf) {
    return (int)check(openat(cgroups, leaf->call, O_PATH | O_DIRECTORY | O_CLOEXEC), leaf->call);
}

static void read_file(const struct leaf *leaf, const char *name) {
    char path[96], content[4096];
    snprintf(path, sizeof path, "%s/%s", leaf->call, name);
    int file = (int)check(openat(cgroups, path, O_RDONLY | O_CLOEXEC), path);
    check(read(file, content, sizeof content), path);
    close(file);
}

static void take_away(const struct leaf *leaf) {
    check(unlinkat(cgroups, leaf->call, AT_REMOVEDIR), leaf->call);
    check(unlinkat(cgroups, leaf->slice, AT_REMOVEDIR), leaf->slice);
}

static void evaluate_and_remove(const struct leaf *leaf) {
    read_file(leaf, "cgroup.events");
    read_file(leaf, "cpu.stat");
    take_away(leaf);
}

static void launch(const struct leaf *leaf) {
    make(leaf);
    int cgroup = opened(leaf);
    wait_for(born(CLONE_NEWPID | CLONE_INTO_CGROUP, cgroup, everything));
    close(cgroup);
    evaluate_and_remove(leaf);
}

/* --- What is measured --- */

static int standing;

static void run_plain(void) {
    static char *const arguments[] = {PROGRAM, NULL}, *const environment[] = {NULL};
    pid_t started;
    int error = posix_spawn(&started, PROGRAM, NULL, NULL, arguments, environment);
    if (error) fail_with(error, PROGRAM);
    wait_for(started);
}
static void run_bare(void) { child(nothing); }
static void run_namespaces(void) { child(namespaces); }
static void run_pid_namespace(void) { wait_for(born(CLONE_NEWPID | CLONE_INTO_CGROUP, standing, nothing)); }
static void run_cgroup(void) {
    struct leaf leaf = leaf_of(1);
    make(&leaf);
    close(opened(&leaf));
    evaluate_and_remove(&leaf);
}
static void run_mount_namespace(void) { child(mount_namespace); }
static void run_mounts(void) { child(namespace_and_mounts); }
static void run_identity(void) { child(identity); }
static void run_landlock(void) { child(landlock); }
static void run_seccomp(void) { child(seccomp); }
static void run_together(void) {
    struct leaf leaf = leaf_of(2);
    launch(&leaf);
}

enum { PLAIN, BARE, MOUNT_NAMESPACE, NAMESPACE_SET, PID_NAMESPACE, CGROUP, MOUNTS, IDENTITY, LANDLOCK, SECCOMP, TOGETHER };
static const struct {
    const char *name;
    void (*run)(void);
    /* What it has in common with this one is not its own. */
    int less;
} OPERATIONS[] = {
    [PLAIN] = {"plain", run_plain, -1},
    [BARE] = {"bare_child", run_bare, -1},
    [MOUNT_NAMESPACE] = {"mount_namespace", run_mount_namespace, BARE},
    [NAMESPACE_SET] = {"namespaces", run_namespaces, BARE},
    [PID_NAMESPACE] = {"pid_namespace", run_pid_namespace, BARE},
    [CGROUP] = {"cgroup", run_cgroup, -1},
    [MOUNTS] = {"mounts", run_mounts, MOUNT_NAMESPACE},
    [IDENTITY] = {"identity", run_identity, BARE},
    [LANDLOCK] = {"landlock", run_landlock, BARE},
    [SECCOMP] = {"seccomp", run_seccomp, BARE},
    [TOGETHER] = {"together", run_together, -1},
};

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

static int ascending(const void *left, const void *right) {
    int64_t one = *(const int64_t *)left, other = *(const int64_t *)right;
    return (one > other) - (one < other);
}

static void alone(size_t rounds) {
    struct leaf leaf = leaf_of(0);
    make(&leaf);
    standing = opened(&leaf);
    int64_t *samples[COUNT(OPERATIONS)], p50[COUNT(OPERATIONS)];
    for (size_t i = 0; i < COUNT(OPERATIONS); i++)
        if (!(samples[i] = calloc(rounds, sizeof *samples[i]))) fail("calloc");
    for (size_t round = 0; round < rounds; round++) {
        for (size_t i = 0; i < COUNT(OPERATIONS); i++) {
            int64_t start = now();
            OPERATIONS[i].run();
            samples[i][round] = now() - start;
        }
    }
    take_away(&leaf);
    for (size_t i = 0; i < COUNT(OPERATIONS); i++) {
        qsort(samples[i], rounds, sizeof *samples[i], ascending);
        p50[i] = samples[i][(rounds - 1) / 2];
    }
    for (size_t i = 0; i < COUNT(OPERATIONS); i++) {
        int64_t own = p50[i] - (OPERATIONS[i].less < 0 ? 0 : p50[OPERATIONS[i].less]);
        printf("%s\"%s\":%lld", i ? "," : "{", OPERATIONS[i].name, (long long)own);
    }
    puts("}");
}

static void together(unsigned workers, unsigned each) {
    int64_t start = now();
    for (unsigned worker = 0; worker < workers; worker++) {
        pid_t forked = (pid_t)check(fork(), "fork");
        if (forked) continue;
        check(prctl(PR_SET_PDEATHSIG, SIGKILL), "death signal");
        struct leaf leaf = leaf_of(worker);
        for (unsigned done = 0; done < each; done++) launch(&leaf);
        _exit(0);
    }
    for (unsigned worker = 0; worker < workers; worker++) wait_for(-1);
    printf("{\"launches\":%u,\"nanoseconds\":%lld}\n", workers * each, (long long)(now() - start));
}

static unsigned number(const char *text) {
    unsigned long value = strtoul(text, NULL, 10);
    if (!value || value > 1000000) fail_with(EINVAL, text);
    return (unsigned)value;
}

int main(int count, char **arguments) {
    int is_together = count > 1 && !strcmp(arguments[1], "together");
    int fixed = is_together ? 5 : 4;
    if (count <= fixed || (!is_together && strcmp(arguments[1], "alone"))) {
        fputs("usage: floor alone CGROUP ROUNDS BIND... | floor together CGROUP WORKERS EACH BIND...\n", stderr);
        return 2;
    }
    cgroups = (int)check(open(arguments[2], O_PATH | O_DIRECTORY | O_CLOEXEC), arguments[2]);
    landlock_version = check(syscall(SYS_landlock_create_ruleset, NULL, 0, 1), "Landlock");
    plan(arguments + fixed, (size_t)(count - fixed));
    compile_filter();
    if (is_together)
        together(number(arguments[3]), number(arguments[4]));
    else
        alone(number(arguments[3]));
    return 0;
}
