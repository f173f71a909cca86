/* A wall clock that can be stepped: preloaded, it shifts CLOCK_REALTIME by the seconds in the file DRILL_CLOCK.
 *
 * The kernel wakes a thread by its own clock, so an absolute wall-clock time that a thread waits for is shifted back.
 * Monotonic times are left alone; the two cannot be confused, since the machine has not been up for thirty years. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const time_t WALL = 1000000000;
static const volatile int64_t *shift;

__attribute__((constructor)) static void open_shift(void)
{
    const char *name = getenv("DRILL_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *at = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (at != MAP_FAILED)
        shift = at;
}

static int64_t seconds(void)
{
    return shift ? *shift : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += seconds();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec fine;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (now)
        *now = fine.tv_sec;
    return fine.tv_sec;
}

static struct timespec kernel_time(const struct timespec *until)
{
    struct timespec shifted = *until;
    if (shifted.tv_sec > WALL)
        shifted.tv_sec -= seconds();
    return shifted;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) {
        *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
        if (!real)
            *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    }
    struct timespec shifted = kernel_time(until);
    return real(cond, mutex, &shifted);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until)
{
    static int (*real)(pthread_mutex_t *, const struct timespec *);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    struct timespec shifted = kernel_time(until);
    return real(mutex, &shifted);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec shifted = kernel_time(until);
    return real(semaphore, &shifted);
}

/* Abseil, and gRPC with it, waits by the system call itself. */
long syscall(long number, ...)
{
    static long (*real)(long, ...);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    long given[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        given[i] = va_arg(list, long);
    va_end(list);
    struct timespec shifted;
    if (number == SYS_futex && (given[1] & FUTEX_CLOCK_REALTIME) && given[3]) {
        shifted = kernel_time((const struct timespec *)given[3]);
        given[3] = (long)&shifted;
    }
    return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
