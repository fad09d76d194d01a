/* The launches of a module, made again by one call of the driver. In Python what is around that call takes a microsecond
   more; see together.py, which has the object `of` that both read. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define MOST 8 /* tensors of a call */

typedef int (*GraphLaunch)(void *executable, void *stream);
typedef int (*StreamIsCapturing)(void *stream, int *capturing);

/* attributes of `of`, and what is asked of others */
enum {ADDRESSES, DEVICE, EXECUTABLE, GRAPH_LAUNCH, HOOKS, IS_CAPTURING, MAKE, OTHERWISE, STREAM_OF, CALLS, DATA_PTR, HOOK};
static const char *const spelt[] = {
    "addresses", "device", "executable", "graph_launch", "hooks", "is_capturing", "make", "otherwise", "stream_of",
    "calls", "data_ptr", "launch_enter_hook",
};
static PyObject *names[sizeof spelt / sizeof *spelt];

static PyObject *
get(PyObject *of, int name)
{
    return PyObject_GetAttr(of, names[name]);
}

/* A pointer that Python has as a number: an attribute of `of`. NULL with an exception set where it has none. */
static void *
pointer(PyObject *of, int name)
{
    PyObject *number = get(of, name);
    void *found = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    return found;
}

/* Each of these is 1 for yes, 0 for no, -1 with an exception set. */

/* Whether the graph's kernels look for the tensors where they are. */
static int
known(PyObject *of, PyObject *const *tensors, Py_ssize_t count)
{
    PyObject *addresses = get(of, ADDRESSES);
    if (!addresses)
        return -1;
    int same = PyTuple_Check(addresses) && PyTuple_GET_SIZE(addresses) == count;
    for (Py_ssize_t i = 0; i < count && same == 1; i++) {
        PyObject *address = PyObject_CallMethodNoArgs(tensors[i], names[DATA_PTR]);
        same = address ? PyObject_RichCompareBool(address, PyTuple_GET_ITEM(addresses, i), Py_EQ) : -1;
        Py_XDECREF(address);
    }
    Py_DECREF(addresses);
    return same;
}

/* Whether hooks of a profiler are set, which want to see each kernel. */
static int
watched(PyObject *of)
{
    PyObject *hooks = get(of, HOOKS), *hook = hooks ? get(hooks, HOOK) : NULL, *calls = hook ? get(hook, CALLS) : NULL;
    int any = calls ? PyObject_IsTrue(calls) : -1;
    Py_XDECREF(hooks);
    Py_XDECREF(hook);
    Py_XDECREF(calls);
    return any;
}

/* Whether a graph may be launched on the current stream, which is told. */
static int
allowed(PyObject *of, void **stream)
{
    int any = watched(of);
    if (any)
        return any < 0 ? -1 : 0;
    PyObject *stream_of = get(of, STREAM_OF), *device = stream_of ? get(of, DEVICE) : NULL;
    PyObject *current = device ? PyObject_CallOneArg(stream_of, device) : NULL;
    *stream = current ? PyLong_AsVoidPtr(current) : NULL;
    Py_XDECREF(stream_of);
    Py_XDECREF(device);
    Py_XDECREF(current);
    if (!*stream) /* the default stream, which is never captured */
        return PyErr_Occurred() ? -1 : 1;
    /* a capture takes the kernels themselves, to chain them to others */
    StreamIsCapturing is_capturing = (StreamIsCapturing)pointer(of, IS_CAPTURING);
    int capturing;
    return is_capturing ? !is_capturing(*stream, &capturing) && !capturing : -1;
}

/* Whether the graph could be launched. */
static int
launched(PyObject *of)
{
    void *stream;
    int may = allowed(of, &stream);
    if (may != 1)
        return may;
    void *executable = pointer(of, EXECUTABLE);
    GraphLaunch graph_launch = executable ? (GraphLaunch)pointer(of, GRAPH_LAUNCH) : NULL;
    if (!graph_launch)
        return -1;
    int result;
    Py_BEGIN_ALLOW_THREADS /* while the device's queue is full it waits, perhaps for what needs Python to go on */
    result = graph_launch(executable, stream);
    Py_END_ALLOW_THREADS
    return result == 0;
}

static PyObject *
replay_call(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (count < 1 || count >= 1 + MOST)
        return PyErr_Format(PyExc_TypeError, "call takes launches and at most %d tensors", MOST - 1);
    PyObject *of[1 + MOST], *make = get(given[0], MAKE), *y = NULL;
    if (!make)
        return NULL;
    memcpy(of, given, count * sizeof *of);
    if (make != Py_None && (y = PyObject_CallNoArgs(make)))
        of[count++] = y;
    int failed = make != Py_None && !y;
    Py_DECREF(make);
    if (failed)
        return NULL;
    int done = known(of[0], of + 1, count - 1);
    if (done == 1)
        done = launched(of[0]);
    if (done == 0) {
        PyObject *nothing = PyObject_VectorcallMethod(names[OTHERWISE], of, count, NULL);
        done = nothing ? 1 : -1;
        Py_XDECREF(nothing);
    }
    if (done == 1)
        return y ? y : Py_NewRef(Py_None);
    Py_XDECREF(y);
    return NULL;
}

static PyObject *
replay_allowed(PyObject *module, PyObject *of)
{
    void *stream;
    int may = allowed(of, &stream);
    return may < 0 ? NULL : PyBool_FromLong(may);
}

static PyObject *
replay_launched(PyObject *module, PyObject *of)
{
    int done = launched(of);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyMethodDef functions[] = {
    {"call", (PyCFunction)(void (*)(void))replay_call, METH_FASTCALL,
     "call(of, *tensors): launch its graph where it stands; else of.otherwise(*tensors). Returns the y of of.make()."},
    {"allowed", replay_allowed, METH_O, "Whether a graph may be launched: no hook is set, nothing is captured."},
    {"launched", replay_launched, METH_O, "Launch the graph as it is, where that is allowed; whether it was."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "lorac_replay", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit_lorac_replay(void)
{
    for (size_t i = 0; i < sizeof spelt / sizeof *spelt; i++)
        if (!(names[i] = PyUnicode_InternFromString(spelt[i])))
            return NULL;
    return PyModule_Create(&definition);
}
