/* Reads of files by threads that never hold Python's interpreter lock: see read_backends.py.
 *
 * A request may be cut into pieces that a drive's threads read side by side, and what they have read may be copied on at once, to a device or to
 * other memory. So whoever submits deals with one end per record, whatever it takes to keep the drive and the link to the device busy: Python takes
 * 50 to 100 us for an end, a piece of a fast drive arrives every 25 us.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Reads `needed` bytes from `begin` on into `buffer`, which has `room` bytes, in pieces of `piece` bytes, a multiple of the drive's alignment. What
 * lies behind the first `lead` of them is copied to `target`, unless that is 0. */
struct request {
    int64_t id;
    const char *path;
    void *buffer;
    int64_t begin, needed, room;
    int64_t drive, piece, lead;
    uint64_t target;
    void *stream;
};

/* How a read ended: the bytes that are there, errno or 0, how long it took, and when that was, on the monotonic clock. `copied` is 1 if all of it is
 * under way to the target, and `refused` what the copy said if it said no. */
struct completion {
    int64_t id, got, error, copied, refused;
    double seconds, ended;
};

/* How bytes are copied on: 0 if they are under way. A thread enters the context before its first copy. Pieces that lie side by side are copied in one
 * call of `least` bytes or more, as far as there are so many: the calls of all threads go through one driver, one at a time. Once a drive has nothing
 * more to begin, each piece goes on at once: the link should not be busy for long after the last of them. */
struct uploader {
    int (*copy)(uint64_t target, const void *source, size_t n, void *stream);
    int (*enter)(void *context);
    void *context;
    int64_t least;
};

enum piece_state { IS_MISSING, IS_READ, IS_COPIED };

struct item {
    struct item *next;
    /* All that were submitted and not taken yet, to find one by its number. */
    struct item *older, *newer;
    struct request request;
    struct completion completion;
    int64_t n_pieces, n_begun, n_ended, n_read, n_copied, n_copying;
    /* Of each piece, what became of it. */
    enum piece_state *states;
    /* The piece that ended the request early. */
    int64_t broken;
    int is_cancelled;
    double began;
    char path[];
};

struct list {
    struct item *first, *last;
};

struct drive {
    pthread_cond_t has_work;
    struct list waiting;
    /* Pieces that have not begun, threads that wait for one, and those of them that whoever submits wakes next. */
    int64_t n_waiting, n_idle, n_to_wake;
    int64_t is_direct, alignment;
    /* What it is slowed down to, 0 for nothing, and when it is free again. */
    double bytes_per_s, free_at;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t has_done, has_ended, has_copied;
    struct list done;
    /* How many ends there are, and how many the taker wants to be woken for. */
    int64_t n_done, n_wanted;
    int is_closed;
    int64_t n_drives, n_alive;
    struct drive *drives;
    struct item *newest;
    struct uploader uploader;
};

struct place {
    struct pool *pool;
    struct drive *drive;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct timespec timespec_of(double seconds) {
    struct timespec t = {.tv_sec = (time_t)seconds};
    t.tv_nsec = (long)(1e9 * (seconds - (double)t.tv_sec));
    return t;
}

static void append(struct list *list, struct item *item) {
    item->next = NULL;
    if (list->last)
        list->last->next = item;
    else
        list->first = item;
    list->last = item;
}

static struct item *take_first(struct list *list) {
    struct item *item = list->first;
    if (item && !(list->first = item->next))
        list->last = NULL;
    return item;
}

/* Reads until `needed` bytes are there or the file ends; returns how many are, or -1. A direct read goes on from an aligned place. */
static int64_t fill(int fd, char *buffer, int64_t begin, int64_t needed, int64_t room, int64_t alignment) {
    int64_t done = 0;
    while (done < needed) {
        int64_t start = done - done % alignment;
        ssize_t got = pread(fd, buffer + start, (size_t)(room - start), begin + start);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (start + got <= done)
            break;
        done = start + got;
    }
    return done < needed ? done : needed;
}

/* Reads bytes `from` to `to` of what is needed; returns how many are there, or -1 with *error set. */
static int64_t read_piece(const struct drive *drive, const struct item *item, int64_t from, int64_t to, int64_t *error) {
    const struct request *r = &item->request;
    int fd = open(item->path, O_RDONLY | O_CLOEXEC | (drive->is_direct ? O_DIRECT : 0));
    if (fd < 0) {
        *error = errno;
        return -1;
    }
    int64_t room = to < r->needed ? to - from : r->room - from;
    int64_t got = fill(fd, (char *)r->buffer + from, r->begin + from, to - from, room, drive->is_direct ? drive->alignment : 1);
    *error = got < 0 ? errno : 0;
    if (!drive->is_direct)
        posix_fadvise(fd, r->begin + from, to - from, POSIX_FADV_DONTNEED);
    close(fd);
    return got;
}

static int copy_to_memory(uint64_t target, const void *source, size_t n, void *stream) {
    (void)stream;
    memcpy((void *)(uintptr_t)target, source, n);
    return 0;
}

/* As a device that serves one read after another would have it: returns when this one may end. */
static double slowed_end(struct pool *pool, struct drive *drive, double began, int64_t n_bytes) {
    pthread_mutex_lock(&pool->lock);
    double from = drive->free_at > began ? drive->free_at : began;
    double ends = drive->free_at = from + (double)n_bytes / drive->bytes_per_s;
    pthread_mutex_unlock(&pool->lock);
    return ends;
}

static void add_done(struct pool *pool, struct item *item) {
    append(&pool->done, item);
    if (++pool->n_done >= pool->n_wanted)
        pthread_cond_signal(&pool->has_done);
}

/* Copies some pieces on; the pool is locked before and after. */
static void copy_pieces(struct pool *pool, struct item *item, int64_t first, int64_t end, int *has_entered) {
    const struct request *r = &item->request;
    int64_t from = first * r->piece, to = end * r->piece < r->needed ? end * r->piece : r->needed, refused = 0;
    from = from < r->lead ? r->lead : from;
    for (int64_t k = first; k < end; k++)
        item->states[k] = IS_COPIED;
    item->n_copying++;
    pthread_mutex_unlock(&pool->lock);
    if (pool->uploader.enter && !*has_entered)
        refused = pool->uploader.enter(pool->uploader.context);
    *has_entered = !refused;
    if (!refused && from < to)
        refused = pool->uploader.copy(r->target + (uint64_t)(from - r->lead), (char *)r->buffer + from, (size_t)(to - from), r->stream);
    pthread_mutex_lock(&pool->lock);
    item->n_copying--;
    if (refused)
        item->completion.refused = refused;
    else
        item->n_copied += end - first;
    if (item->is_cancelled || pool->is_closed)
        pthread_cond_broadcast(&pool->has_copied);
}

/* Takes note of a piece that is there, and copies what is worth a copy now, as far as it is still wanted; the pool is locked before and after. */
static void take_piece(struct pool *pool, const struct drive *drive, struct item *item, int64_t piece, int *has_entered) {
    const struct request *r = &item->request;
    int64_t least = drive->n_waiting ? pool->uploader.least : 0;
    item->states[piece] = IS_READ;
    int is_last = ++item->n_read == item->n_pieces;
    for (int64_t first = 0, end; r->target && first < item->n_pieces; first = end) {
        for (end = first; end < item->n_pieces && item->states[end] == IS_READ; end++)
            ;
        if (end == first)
            end++;
        else if (item->is_cancelled || pool->is_closed || item->completion.refused)
            return;
        else if (is_last || (end - first) * r->piece >= least)
            copy_pieces(pool, item, first, end, has_entered);
    }
}

/* Accounts for the end of a piece, locked; the last one ends the request. */
static void end_piece(struct pool *pool, struct item *item, int64_t piece, int64_t got, int64_t error, double ended) {
    const struct request *r = &item->request;
    struct completion *c = &item->completion;
    int64_t from = piece * r->piece, to = from + r->piece < r->needed ? from + r->piece : r->needed;
    if ((error || got < to - from) && piece < item->broken) {
        item->broken = piece;
        c->error = error;
        c->got = error ? -1 : from + got;
    }
    c->ended = ended > c->ended ? ended : c->ended;
    if (++item->n_ended < item->n_pieces)
        return;
    if (item->broken == item->n_pieces)
        c->got = r->needed;
    c->copied = r->target && item->n_copied == item->n_pieces;
    c->seconds = c->ended - item->began;
    add_done(pool, item);
}

static void *serve(void *argument) {
    struct place place = *(struct place *)argument;
    struct pool *pool = place.pool;
    struct drive *drive = place.drive;
    int has_entered = 0;
    free(argument);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->is_closed && !drive->waiting.first) {
            drive->n_idle++;
            pthread_cond_wait(&drive->has_work, &pool->lock);
            drive->n_idle--;
        }
        if (pool->is_closed)
            break;
        struct item *item = drive->waiting.first;
        const struct request *r = &item->request;
        int64_t piece = item->n_begun++, from = piece * r->piece, to = from + r->piece < r->needed ? from + r->piece : r->needed;
        drive->n_waiting--;
        if (item->n_begun == item->n_pieces)
            take_first(&drive->waiting);
        int is_over = item->broken < item->n_pieces || item->is_cancelled;
        double began = now(), ended = began;
        if (!piece)
            item->began = began;
        int64_t got = 0, error = item->is_cancelled ? ECANCELED : 0;
        /* What comes behind a piece that is not there is not read either. */
        if (!is_over) {
            pthread_mutex_unlock(&pool->lock);
            got = read_piece(drive, item, from, to, &error);
            if (drive->bytes_per_s > 0 && got > 0) {
                struct timespec until = timespec_of(slowed_end(pool, drive, began, got));
                while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
                    ;
            }
            ended = now();
            pthread_mutex_lock(&pool->lock);
            if (got == to - from)
                take_piece(pool, drive, item, piece, &has_entered);
        }
        end_piece(pool, item, piece, got, error, ended);
    }
    pool->n_alive--;
    pthread_cond_signal(&pool->has_ended);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int start_thread(struct pool *pool, int64_t drive, int64_t number) {
    struct place *place = malloc(sizeof *place);
    pthread_t thread;
    char name[16];
    if (!place)
        return ENOMEM;
    *place = (struct place){pool, &pool->drives[drive]};
    pool->n_alive++;
    int error = pthread_create(&thread, NULL, serve, place);
    if (error) {
        pool->n_alive--;
        free(place);
        return error;
    }
    snprintf(name, sizeof name, "reader-%d-%d", (int)drive, (int)number);
    pthread_setname_np(thread, name);
    pthread_detach(thread);
    return 0;
}

/* Waits on a condition until a time of the monotonic clock. */
static int wait_until(pthread_cond_t *condition, pthread_mutex_t *lock, double until) {
    struct timespec t = timespec_of(until);
    return pthread_cond_timedwait(condition, lock, &t);
}

/* Makes a pool; *error is 0 or says why some of its threads could not be started. NULL if there is no memory. Without a copy function bytes are
 * copied to memory. */
struct pool *pool_open(int64_t n_drives, const int64_t *depths, const int64_t *is_direct, const int64_t *alignments, const double *rates,
                       const struct uploader *uploader, int *error) {
    struct pool *pool = calloc(1, sizeof *pool);
    sigset_t all, before;
    pthread_condattr_t monotonic;
    if (!pool || !(pool->drives = calloc((size_t)n_drives, sizeof *pool->drives))) {
        free(pool);
        return NULL;
    }
    pool->n_drives = n_drives;
    pool->uploader = *uploader;
    if (!pool->uploader.copy)
        pool->uploader.copy = copy_to_memory;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->has_done, &monotonic);
    pthread_cond_init(&pool->has_ended, &monotonic);
    pthread_cond_init(&pool->has_copied, &monotonic);
    /* Signals are Python's main thread's. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_mutex_lock(&pool->lock);
    *error = 0;
    for (int64_t n = 0; n < n_drives; n++) {
        pthread_cond_init(&pool->drives[n].has_work, &monotonic);
        pool->drives[n].is_direct = is_direct[n];
        pool->drives[n].alignment = alignments[n];
        pool->drives[n].bytes_per_s = rates[n];
        for (int64_t k = 0; k < depths[n] && !*error; k++)
            *error = start_thread(pool, n, k);
    }
    pthread_mutex_unlock(&pool->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}

static void free_item(struct item *item) {
    free(item->states);
    free(item);
}

static struct item *new_item(int64_t id, size_t path_bytes, int64_t n_pieces) {
    struct item *item = calloc(1, sizeof *item + path_bytes);
    if (!item)
        return NULL;
    item->completion.id = item->request.id = id;
    item->broken = item->n_pieces = n_pieces;
    if (!(item->states = calloc((size_t)n_pieces, sizeof *item->states))) {
        free(item);
        return NULL;
    }
    return item;
}

/* Puts an item among those that can be found, locked. */
static void enter_item(struct pool *pool, struct item *item) {
    item->older = pool->newest;
    if (pool->newest)
        pool->newest->newer = item;
    pool->newest = item;
}

static void leave_item(struct pool *pool, struct item *item) {
    if (item->older)
        item->older->newer = item->newer;
    if (item->newer)
        item->newer->older = item->older;
    else
        pool->newest = item->older;
}

/* Wakes as many threads as there are pieces for, at least, and all at once: one after another they would be busy only after a few hundred
 * microseconds. */
static void wake(struct drive *drive) {
    if (drive->n_to_wake > 2)
        pthread_cond_broadcast(&drive->has_work);
    else
        while (drive->n_to_wake-- > 0)
            pthread_cond_signal(&drive->has_work);
}

/* Queues reads; returns 0, or ENOMEM with none of them queued. */
int pool_submit(struct pool *pool, int64_t n, const struct request *requests) {
    struct list made = {0};
    for (int64_t k = 0; k < n; k++) {
        struct request r = requests[k];
        size_t length = strlen(r.path) + 1;
        if (r.piece < 1 || r.piece > r.needed)
            r.piece = r.needed > 0 ? r.needed : 1;
        struct item *item = new_item(r.id, length, r.needed > 0 ? (r.needed + r.piece - 1) / r.piece : 1);
        if (!item) {
            while ((item = take_first(&made)))
                free_item(item);
            return ENOMEM;
        }
        memcpy(item->path, r.path, length);
        item->request = r;
        append(&made, item);
    }
    pthread_mutex_lock(&pool->lock);
    for (struct item *item; (item = take_first(&made));) {
        struct drive *drive = &pool->drives[item->request.drive];
        enter_item(pool, item);
        append(&drive->waiting, item);
        drive->n_waiting += item->n_pieces;
    }
    for (int64_t k = 0; k < pool->n_drives; k++) {
        struct drive *drive = &pool->drives[k];
        drive->n_to_wake = drive->n_waiting < drive->n_idle ? drive->n_waiting : drive->n_idle;
    }
    pthread_mutex_unlock(&pool->lock);
    /* Without the lock, which those that wake want at once. */
    for (int64_t k = 0; k < pool->n_drives; k++)
        wake(&pool->drives[k]);
    return 0;
}

/* Has nothing more of a read begin, and ends it with ECANCELED if that leaves a piece out. Afterwards no thread touches its target, but pieces that are
 * being read and copies that are under way go on. */
void pool_cancel(struct pool *pool, int64_t id) {
    pthread_mutex_lock(&pool->lock);
    struct item *item = pool->newest;
    while (item && item->request.id != id)
        item = item->older;
    if (item) {
        item->is_cancelled = 1;
        while (item->n_copying)
            pthread_cond_wait(&pool->has_copied, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}

/* Has the taker find an end that is no read's. Returns 0 or ENOMEM. */
int pool_post(struct pool *pool, int64_t id) {
    struct item *item = new_item(id, 1, 1);
    if (!item)
        return ENOMEM;
    pthread_mutex_lock(&pool->lock);
    enter_item(pool, item);
    add_done(pool, item);
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

/* Takes up to `most` ends; waits up to `timeout_s` for the first, and once it is there up to `linger_s` for `least` of them. Returns how many. */
int64_t pool_take(struct pool *pool, struct completion *out, int64_t most, double timeout_s, int64_t least, double linger_s) {
    int64_t n = 0;
    double until = timeout_s > 0 ? now() + timeout_s : 0;
    pthread_mutex_lock(&pool->lock);
    pool->n_wanted = 1;
    while (!pool->n_done && timeout_s > 0)
        if (wait_until(&pool->has_done, &pool->lock, until) == ETIMEDOUT)
            break;
    pool->n_wanted = least;
    until = pool->n_done && pool->n_done < least ? now() + linger_s : 0;
    while (pool->n_done && pool->n_done < least)
        if (wait_until(&pool->has_done, &pool->lock, until) == ETIMEDOUT)
            break;
    for (struct item *item; n < most && (item = take_first(&pool->done));) {
        out[n++] = item->completion;
        leave_item(pool, item);
        free_item(item);
    }
    pool->n_done -= n;
    pthread_mutex_unlock(&pool->lock);
    return n;
}

/* Drops what was not begun, and waits up to `timeout_s` for the threads; returns how many of them are still at a read. */
int64_t pool_close(struct pool *pool, double timeout_s) {
    double until = now() + timeout_s;
    pthread_mutex_lock(&pool->lock);
    pool->is_closed = 1;
    for (int64_t n = 0; n < pool->n_drives; n++)
        pthread_cond_broadcast(&pool->drives[n].has_work);
    while (pool->n_alive)
        if (wait_until(&pool->has_ended, &pool->lock, until) == ETIMEDOUT)
            break;
    int64_t n_alive = pool->n_alive;
    pthread_mutex_unlock(&pool->lock);
    return n_alive;
}

/* Gives a closed pool back whose threads have all ended. */
void pool_free(struct pool *pool) {
    struct item *item;
    while ((item = pool->newest)) {
        pool->newest = item->older;
        free_item(item);
    }
    free(pool->drives);
    free(pool);
}
