package ibv

// mutexSize is sizeof(pthread_mutex_t) of glibc.
const mutexSize = 40
