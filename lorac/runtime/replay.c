/* The launches of a module, made again by one call of the driver. In Python what is around that call takes a microsecond
   more. `launches` is a Together everywhere; together.py says what its attributes are. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define MOST_GIVEN 7 /* tensors that a call is passed */

typedef int (*GraphLaunch)(void *executable, void *stream);
typedef int (*StreamIsCapturing)(void *stream, int *capturing);

enum { ADDRESSES, DEVICE, EXECUTABLE, GRAPH_LAUNCH, HOOKS, IS_CAPTURING, MAKE, OTHERWISE, STREAM_OF, CALLS, DATA_PTR, HOOK };
static const char *const spelt[] = {
    /* attributes of launches */
    [ADDRESSES] = "addresses",
    [DEVICE] = "device",
    [EXECUTABLE] = "executable",
    [GRAPH_LAUNCH] = "graph_launch",
    [HOOKS] = "hooks",
    [IS_CAPTURING] = "is_capturing",
    [MAKE] = "make",
    [OTHERWISE] = "otherwise",
    [STREAM_OF] = "stream_of",
    /* of hooks, of a tensor, of a hook */
    [HOOK] = "launch_enter_hook",
    [DATA_PTR] = "data_ptr",
    [CALLS] = "calls",
};
static PyObject *names[sizeof spelt / sizeof *spelt];

static PyObject *
get(PyObject *object, int name)
{
    return PyObject_GetAttr(object, names[name]);
}

/* An attribute that is a pointer, as a number. NULL, with an exception set, where it is none. */
static void *
pointer(PyObject *launches, int name)
{
    PyObject *number = get(launches, name);
    void *found = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (!found && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%s is 0", spelt[name]);
    return found;
}

/* What follows answers 1 for yes, 0 for no, -1 with an exception set. */

/* Do the graph's kernels look for the tensors where they are? */
static int
known(PyObject *launches, PyObject *const *tensors, Py_ssize_t count)
{
    PyObject *addresses = get(launches, ADDRESSES);
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

/* Are hooks of a profiler set, which want to see each kernel? */
static int
watched(PyObject *launches)
{
    PyObject *hooks = get(launches, HOOKS), *hook = hooks ? get(hooks, HOOK) : NULL;
    PyObject *calls = hook ? get(hook, CALLS) : NULL;
    int any = calls ? PyObject_IsTrue(calls) : -1;
    Py_XDECREF(hooks);
    Py_XDECREF(hook);
    Py_XDECREF(calls);
    return any;
}

/* May a graph be launched? Then `stream` is the current one. */
static int
may_launch(PyObject *launches, void **stream)
{
    int any = watched(launches);
    if (any)
        return any < 0 ? -1 : 0;
    PyObject *stream_of = get(launches, STREAM_OF), *device = stream_of ? get(launches, DEVICE) : NULL;
    PyObject *current = device ? PyObject_CallOneArg(stream_of, device) : NULL;
    *stream = current ? PyLong_AsVoidPtr(current) : NULL;
    Py_XDECREF(stream_of);
    Py_XDECREF(device);
    Py_XDECREF(current);
    if (!*stream) /* the default stream, which is never captured */
        return PyErr_Occurred() ? -1 : 1;
    /* a capture takes the kernels themselves, to chain them to others */
    StreamIsCapturing is_capturing = (StreamIsCapturing)pointer(launches, IS_CAPTURING);
    int capturing;
    return is_capturing ? !is_capturing(*stream, &capturing) && !capturing : -1;
}

/* Launch the graph as it is: was that allowed, and done? */
static int
try_launch(PyObject *launches)
{
    void *stream;
    int may = may_launch(launches, &stream);
    if (may != 1)
        return may;
    void *executable = pointer(launches, EXECUTABLE);
    GraphLaunch graph_launch = executable ? (GraphLaunch)pointer(launches, GRAPH_LAUNCH) : NULL;
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
    if (count < 1 || count > 1 + MOST_GIVEN)
        return PyErr_Format(PyExc_TypeError, "call takes launches, and at most %d tensors", MOST_GIVEN);
    PyObject *all[1 + MOST_GIVEN + 1]; /* launches, tensors, and y */
    memcpy(all, given, count * sizeof *all);
    PyObject *launches = all[0], *make = get(launches, MAKE), *y = NULL;
    if (!make)
        return NULL;
    int makes = make != Py_None;
    if (makes)
        y = all[count++] = PyObject_CallNoArgs(make);
    Py_DECREF(make);
    if (makes && !y)
        return NULL;
    int done = known(launches, all + 1, count - 1);
    if (done == 1)
        done = try_launch(launches);
    if (done == 0) {
        PyObject *nothing = PyObject_VectorcallMethod(names[OTHERWISE], all, count, NULL);
        done = nothing ? 1 : -1;
        Py_XDECREF(nothing);
    }
    if (done == 1)
        return y ? y : Py_NewRef(Py_None);
    Py_XDECREF(y);
    return NULL;
}

static PyObject *
replay_may_launch(PyObject *module, PyObject *launches)
{
    void *stream;
    int may = may_launch(launches, &stream);
    return may < 0 ? NULL : PyBool_FromLong(may);
}

static PyObject *
replay_try_launch(PyObject *module, PyObject *launches)
{
    int done = try_launch(launches);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyMethodDef functions[] = {
    {"call", (PyCFunction)(void (*)(void))replay_call, METH_FASTCALL,
     "call(launches, *tensors): launch the graph, or have launches.otherwise(*tensors) do so. With launches.make the last\n"
     "tensor is what that returns: it is made for the call, and returned."},
    {"may_launch", replay_may_launch, METH_O, "Whether a graph may be launched: no hook is set, nothing is captured."},
    {"try_launch", replay_try_launch, METH_O, "Launch the graph as it is; whether that was allowed, and done."},
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
