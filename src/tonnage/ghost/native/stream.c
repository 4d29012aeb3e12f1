/* Streams and events.
 *
 * A stream counts the work submitted to it.  With immediate events all work is done at once; with lazy events it is
 * done when the program waits: for the stream, for an event in it, for the device, or for another stream that waits
 * for this one.  A real card lies between these two extremes.  An event that is polled and not waited for is done
 * after LAZY_SECONDS, so that no poll goes on for ever.
 *
 * By default, a polled event is done if a kernel was launched since it was recorded: no card completes work at the
 * moment that it gets it, and most have when the next kernel has been prepared.  A poll that goes on ends after
 * SOON_POLLS, or after SOON_SECONDS in another thread than the recording one (NCCL's watchdog): the time that the
 * allocator's own thread takes between two calls depends on the machine, and must decide nothing. */
#define _GNU_SOURCE
#include "ghost.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LAZY_SECONDS 10.0
#define SOON_SECONDS 0.05
#define SOON_POLLS 100

struct wait {
    struct wait *next;
    uint64_t at; /* position in the waiting stream */
    struct CUstream_st *other;
    uint64_t position;
};

struct CUevent_st {
    struct CUstream_st *stream; /* NULL until recorded */
    uint64_t position;
    double seconds;    /* host clock at the record */
    pthread_t thread;  /* that recorded it */
    uint64_t launches; /* kernels launched before the record */
    int polls;         /* so far that found it not done */
    struct capture *capture; /* the capture that recorded it, if any */
};

static struct CUstream_st default_streams[MAX_DEVICES];
static struct CUstream_st *streams[1 << 16]; /* every stream made; ids index it */
static uint64_t stream_count = 0x100;        /* ids of made streams start here */
static uint64_t launches;                    /* kernels so far */
static uint64_t awaited;                     /* of these, how many the host has waited for */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Handles 0, 1 (legacy) and 2 (per thread) are the device's default stream. */
struct CUstream_st *stream_of(cudaStream_t handle)
{
    if ((uintptr_t)handle > 2)
        return handle;
    default_streams[current_device].device = current_device;
    return &default_streams[current_device];
}

static void wait_for_launches(uint64_t number)
{
    if (awaited < number)
        awaited = number;
}

bool stream_done(const struct CUstream_st *stream, uint64_t position)
{
    return !config()->lazy_events || position <= stream->completed;
}

static void complete(struct CUstream_st *stream, uint64_t position)
{
    if (position <= stream->completed)
        return;
    stream->completed = position;
    struct wait **link = &stream->waits;
    while (*link) {
        struct wait *wait = *link;
        if (wait->at > position) {
            link = &wait->next;
            continue;
        }
        *link = wait->next;
        complete(wait->other, wait->position);
        free(wait);
    }
}

static void stream_complete(struct CUstream_st *stream, uint64_t position)
{
    if (!config()->lazy_events)
        return;
    pthread_mutex_lock(&lock);
    complete(stream, position);
    pthread_mutex_unlock(&lock);
}

static void log_synchronise(cudaStream_t stream)
{
    log_append((struct ghost_record){
        .kind = RECORD_SYNCHRONISE, .device = current_device, .stream = (uint64_t)stream});
}

/* The host waits for all that a stream was given. */
void stream_wait(struct CUstream_st *stream)
{
    stream_complete(stream, stream->submitted);
    wait_for_launches(launches);
}

cudaError_t stream_synchronise(cudaStream_t handle)
{
    struct CUstream_st *stream = stream_of(handle);
    cudaError_t error = capture_check(stream);
    if (error)
        return error;
    stream_wait(stream);
    log_synchronise(handle);
    return SUCCESS;
}

void device_synchronise(int device)
{
    stream_complete(&default_streams[device], default_streams[device].submitted);
    for (uint64_t i = 0x100; config()->lazy_events && i < stream_count && i < 1 << 16; i++)
        if (streams[i] && streams[i]->device == device)
            stream_complete(streams[i], streams[i]->submitted);
    wait_for_launches(launches);
    log_append((struct ghost_record){.kind = RECORD_SYNCHRONISE, .device = device, .flags = 1});
}

API uint64_t ghost_launches(void)
{
    return launches;
}

static uint64_t computed_reads;

/* How often the program was told on the host what a kernel would have computed. */
API uint64_t ghost_computed_reads(void)
{
    return computed_reads;
}

/* It was told so by Python code of ours, in place of a copy. */
API void ghost_note_computed_read(void)
{
    __atomic_fetch_add(&computed_reads, 1, __ATOMIC_RELAXED);
}

/* Logs an operation and does the part of it that has an effect on the host. */
void perform(const struct operation *operation)
{
    if (operation->record.kind)
        log_append(operation->record);
    if (operation->record.kind == RECORD_COPY_D2H && !values_known((uint64_t)operation->source, operation->width))
        ghost_note_computed_read();
    if (operation->record.kind == RECORD_KERNEL)
        __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    switch (operation->action) {
    case DO_COPY:
        for (size_t row = 0; row < operation->height; row++)
            values_copy((char *)operation->target + row * operation->target_pitch,
                        (const char *)operation->source + row * operation->source_pitch, operation->width);
        break;
    case DO_FILL:
        for (size_t row = 0; row < operation->height; row++)
            values_fill((char *)operation->target + row * operation->target_pitch, operation->value,
                        operation->value_bytes, operation->width);
        break;
    case DO_CALL:
        operation->call(operation->target);
        break;
    case DO_NOTHING:
        break;
    }
}

/* Work for a stream: kept in the graph if the stream is capturing, else logged and done. */
void submit(cudaStream_t handle, const struct operation *operation)
{
    struct CUstream_st *stream = stream_of(handle);
    struct operation work = *operation;
    work.record.device = stream->device;
    work.record.stream = (uint64_t)handle;
    if (capture_active(stream)) {
        capture_add(stream, &work);
        return;
    }
    device_use(stream->device);
    __atomic_fetch_add(&stream->submitted, 1, __ATOMIC_RELAXED);
    perform(&work);
}

/* ---- streams ---- */

static cudaError_t create_stream(cudaStream_t *handle, unsigned flags, int priority)
{
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    device_use(current_device);
    stream->device = current_device;
    stream->flags = flags;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    pthread_mutex_lock(&lock);
    stream->id = stream_count++;
    if (stream->id < sizeof streams / sizeof *streams)
        streams[stream->id] = stream;
    pthread_mutex_unlock(&lock);
    *handle = stream;
    return SUCCESS;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    return create_stream(stream, flags, priority);
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return create_stream(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return create_stream(stream, 0, 0);
}

/* The structure stays: events recorded in the stream still point at it. */
API cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    if ((uintptr_t)stream <= 2)
        return runtime_result(ERROR_INVALID_HANDLE);
    stream_complete(stream, stream->submitted);
    return SUCCESS;
}

API cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    struct CUstream_st *stream = stream_of(handle);
    cudaError_t error = capture_check(stream);
    if (error)
        return runtime_result(error);
    return runtime_result(stream_done(stream, stream->submitted) ? SUCCESS : ERROR_NOT_READY);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return runtime_result(stream_synchronise(stream));
}

API cudaError_t cudaDeviceSynchronize(void)
{
    device_use(current_device);
    device_synchronise(current_device);
    return SUCCESS;
}

API cudaError_t cudaThreadSynchronize(void)
{
    return cudaDeviceSynchronize();
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = stream_of(stream)->priority;
    return SUCCESS;
}

API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags)
{
    *flags = stream_of(stream)->flags;
    return SUCCESS;
}

API cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id)
{
    *id = stream_of(stream)->id;
    return SUCCESS;
}

API cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    *device = stream_of(stream)->device;
    return SUCCESS;
}

API cudaError_t cudaStreamAttachMemAsync(cudaStream_t stream, void *pointer, size_t bytes, unsigned flags)
{
    return SUCCESS;
}

/* ---- host functions: called when their turn comes, which is now ---- */

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*call)(void *), void *argument)
{
    struct operation work = {
        .record = {.kind = RECORD_HOST_CALL}, .action = DO_CALL, .call = call, .target = argument};
    submit(stream, &work);
    return SUCCESS;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, void (*call)(cudaStream_t, cudaError_t, void *),
                                      void *argument, unsigned flags)
{
    cudaError_t error = capture_check(stream_of(stream));
    if (error)
        return runtime_result(error);
    struct operation work = {.record = {.kind = RECORD_HOST_CALL}};
    submit(stream, &work);
    call(stream, SUCCESS, argument);
    return SUCCESS;
}

/* ---- events ---- */

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    *event = calloc(1, sizeof **event);
    return SUCCESS;
}

API cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, 0);
}

API cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return SUCCESS;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags)
{
    struct CUstream_st *stream = stream_of(handle);
    struct operation work = {.record = {.kind = RECORD_EVENT, .address = (uint64_t)event}};
    submit(handle, &work);
    event->stream = stream;
    event->position = stream->submitted;
    event->seconds = now();
    event->thread = pthread_self();
    event->launches = launches;
    event->polls = 0;
    event->capture = capture_active(stream) ? stream->capture : NULL;
    return SUCCESS;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, 0);
}

static bool event_done(const struct CUevent_st *event)
{
    return !event->stream || stream_done(event->stream, event->position) ||
           now() - event->seconds > LAZY_SECONDS;
}

/* Whether no kernel was launched since the event was recorded. */
static bool event_is_fresh(struct CUevent_st *event)
{
    if (!event->stream || config()->immediate_events || event->launches <= awaited)
        return false;
    if (event->launches != launches || ++event->polls >= SOON_POLLS)
        return false;
    return pthread_equal(event->thread, pthread_self()) || now() - event->seconds < SOON_SECONDS;
}

API cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (event->capture)
        return runtime_result(ERROR_CAPTURED_EVENT);
    return runtime_result(event_done(event) && !event_is_fresh(event) ? SUCCESS : ERROR_NOT_READY);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (event->capture)
        return runtime_result(ERROR_CAPTURED_EVENT);
    if (event->stream) {
        stream_complete(event->stream, event->position);
        wait_for_launches(event->launches);
    }
    log_append((struct ghost_record){
        .kind = RECORD_SYNCHRONISE, .device = current_device, .flags = 2, .address = (uint64_t)event});
    return SUCCESS;
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    if (!start->stream || !end->stream)
        return runtime_result(ERROR_INVALID_HANDLE);
    if (!event_done(start) || !event_done(end))
        return runtime_result(ERROR_NOT_READY);
    *milliseconds = (float)((end->seconds - start->seconds) * 1e3);
    return SUCCESS;
}

API cudaError_t cudaEventElapsedTime_v2(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    return cudaEventElapsedTime(milliseconds, start, end);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags)
{
    struct CUstream_st *stream = stream_of(handle);
    if (event->capture)
        capture_join(stream, event->capture);
    struct operation work = {.record = {.kind = RECORD_WAIT, .address = (uint64_t)event}};
    submit(handle, &work);
    if (!config()->lazy_events || !event->stream || event->capture)
        return SUCCESS;
    pthread_mutex_lock(&lock);
    struct wait *wait = malloc(sizeof *wait);
    *wait = (struct wait){stream->waits, stream->submitted, event->stream, event->position};
    stream->waits = wait;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
