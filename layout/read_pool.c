/* Reads of files by threads that never hold Python's interpreter lock: see read_pool.py.
 *
 * Python's own threads take that lock several times per read, and each time they may wait for the thread that decides and launches, as that one
 * waits for them. Sixteen small records in 48 reads took 2.3 ms with them and 1.3 ms with these on two cores; on sixteen cores, where the main
 * thread was the limit, these alone changed nothing.
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

/* Reads `needed` bytes from `begin` on into `buffer`, which has `room` bytes. */
struct request {
    int64_t id;
    const char *path;
    void *buffer;
    int64_t begin, needed, room;
    int64_t drive;
};

/* How a read ended: the bytes that are there, errno or 0, how long it took, and when that was, on the monotonic clock. */
struct completion {
    int64_t id, got, error;
    double seconds, ended;
};

struct item {
    struct item *next;
    struct request request;
    struct completion completion;
    char path[];
};

struct list {
    struct item *first, *last;
};

struct drive {
    pthread_cond_t has_work;
    struct list waiting;
    int64_t n_idle;
    int64_t is_direct, alignment;
    /* What it is slowed down to, 0 for nothing, and when it is free again. */
    double bytes_per_s, free_at;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t has_done, has_ended;
    struct list done;
    /* How many ends there are, and how many the taker wants to be woken for. */
    int64_t n_done, n_wanted;
    int is_closed;
    int64_t n_drives, n_alive;
    struct drive *drives;
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
static int64_t fill(int fd, const struct request *r, int64_t alignment) {
    int64_t done = 0;
    while (done < r->needed) {
        int64_t start = done - done % alignment;
        ssize_t got = pread(fd, (char *)r->buffer + start, (size_t)(r->room - start), r->begin + start);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (start + got <= done)
            break;
        done = start + got;
    }
    return done < r->needed ? done : r->needed;
}

static void read_file(const struct drive *drive, struct item *item) {
    struct request *r = &item->request;
    struct completion *c = &item->completion;
    c->got = -1;
    int fd = open(item->path, O_RDONLY | O_CLOEXEC | (drive->is_direct ? O_DIRECT : 0));
    if (fd >= 0) {
        c->got = fill(fd, r, drive->is_direct ? drive->alignment : 1);
        c->error = c->got < 0 ? errno : 0;
        if (!drive->is_direct)
            posix_fadvise(fd, r->begin, r->needed, POSIX_FADV_DONTNEED);
        close(fd);
    } else {
        c->error = errno;
    }
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

static void *serve(void *argument) {
    struct place place = *(struct place *)argument;
    struct pool *pool = place.pool;
    struct drive *drive = place.drive;
    free(argument);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct item *item = NULL;
        while (!pool->is_closed && !(item = take_first(&drive->waiting))) {
            drive->n_idle++;
            pthread_cond_wait(&drive->has_work, &pool->lock);
            drive->n_idle--;
        }
        if (!item)
            break;
        /* To wake a thread takes longer than to queue a read: whoever submits wakes one, and that one the next. */
        int wakes = drive->waiting.first && drive->n_idle;
        pthread_mutex_unlock(&pool->lock);
        if (wakes)
            pthread_cond_signal(&drive->has_work);
        double began = now();
        read_file(drive, item);
        if (drive->bytes_per_s > 0 && item->completion.got > 0) {
            struct timespec until = timespec_of(slowed_end(pool, drive, began, item->completion.got));
            while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
                ;
        }
        item->completion.ended = now();
        item->completion.seconds = item->completion.ended - began;
        pthread_mutex_lock(&pool->lock);
        add_done(pool, item);
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

/* Makes a pool; *error is 0 or says why some of its threads could not be started. NULL if there is no memory. */
struct pool *pool_open(int64_t n_drives, const int64_t *depths, const int64_t *is_direct, const int64_t *alignments, const double *rates, int *error) {
    struct pool *pool = calloc(1, sizeof *pool);
    sigset_t all, before;
    pthread_condattr_t monotonic;
    if (!pool || !(pool->drives = calloc((size_t)n_drives, sizeof *pool->drives))) {
        free(pool);
        return NULL;
    }
    pool->n_drives = n_drives;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->has_done, &monotonic);
    pthread_cond_init(&pool->has_ended, &monotonic);
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

/* Queues reads; returns 0, or ENOMEM with none of them queued. */
int pool_submit(struct pool *pool, int64_t n, const struct request *requests) {
    struct list made = {0};
    for (int64_t k = 0; k < n; k++) {
        size_t length = strlen(requests[k].path) + 1;
        struct item *item = calloc(1, sizeof *item + length);
        if (!item) {
            while ((item = take_first(&made)))
                free(item);
            return ENOMEM;
        }
        memcpy(item->path, requests[k].path, length);
        item->request = requests[k];
        item->completion.id = requests[k].id;
        append(&made, item);
    }
    pthread_mutex_lock(&pool->lock);
    for (struct item *item; (item = take_first(&made));)
        append(&pool->drives[item->request.drive].waiting, item);
    pthread_mutex_unlock(&pool->lock);
    /* Without the lock, which those that wake want at once. */
    for (int64_t k = 0; k < pool->n_drives; k++)
        if (pool->drives[k].waiting.first)
            pthread_cond_signal(&pool->drives[k].has_work);
    return 0;
}

/* Has the taker find an end that is no read's. Returns 0 or ENOMEM. */
int pool_post(struct pool *pool, int64_t id) {
    struct item *item = calloc(1, sizeof *item + 1);
    if (!item)
        return ENOMEM;
    item->completion.id = id;
    pthread_mutex_lock(&pool->lock);
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
        free(item);
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
    for (int64_t n = 0; n < pool->n_drives; n++)
        while ((item = take_first(&pool->drives[n].waiting)))
            free(item);
    while ((item = take_first(&pool->done)))
        free(item);
    free(pool->drives);
    free(pool);
}
