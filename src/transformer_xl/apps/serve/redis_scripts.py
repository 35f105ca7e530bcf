"""The operations of the shared store as scripts of Redis, each of which is atomic.

A session is one hash, so that its fields expire together:

========= ==========================================================================================
fence     the number of the last lease
until     when that lease ends, in microseconds by the clock of Redis; 0: it was given back
holder    who asked for it: random, for each time
version   the number of the lease under which the text was last changed; missing: it has not begun
snap      the version of ``memory``; 0: none
memory    a state as :func:`~transformer_xl.inference.generate.pack_state` packs it
tail      what was appended since: records with a version, tokens read, and tokens drawn
appended  how many tokens and records these are
random    the state of the random numbers
note      a text that the server keeps with the state
weights   the checksum of the weights
========= ==========================================================================================

Keys are that hash, the number of the last lease of all, and a sorted set of all names by last use.
"""

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function text(number) return string.format('%.0f', number) end
"""

ACQUIRE = (
    _NOW
    + """
-- name, microseconds of a lease, milliseconds until an unused session expires, most sessions, who
local fields = redis.call('HMGET', KEYS[1], 'until', 'version', 'appended', 'holder', 'fence')
if fields[1] and tonumber(fields[1]) > now then
  -- Sent again, as its answer was lost.
  if fields[4] == ARGV[5] then return {'ok', fields[5], fields[2] or '0', fields[3] or '0'} end
  return {'busy', ''}
end
if not fields[2] then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', text(now - ARGV[3] * 1000))
  local n = redis.call('ZCARD', KEYS[3])
  if n >= tonumber(ARGV[4]) then return {'many', text(n)} end
end
-- Above all earlier numbers, also if the store has lost what it held: servers remember versions.
local number = text(math.max(now, (redis.call('GET', KEYS[2]) or 0) + 1))
redis.call('SET', KEYS[2], number)
redis.call('HSET', KEYS[1], 'fence', number, 'until', text(now + ARGV[2]), 'holder', ARGV[5])
local left = fields[2] and ARGV[3] or 0
redis.call('PEXPIRE', KEYS[1], text(left + math.ceil(ARGV[2] / 500)))
return {'ok', number, fields[2] or '0', fields[3] or '0'}
"""
)

RENEW = (
    _NOW
    + """
-- number, microseconds of a lease, milliseconds until an unused session expires
local fields = redis.call('HMGET', KEYS[1], 'fence', 'until')
-- Nor one that was given back while this was under way.
if fields[1] ~= ARGV[1] or fields[2] == '0' then return 0 end
redis.call('HSET', KEYS[1], 'until', text(now + ARGV[2]))
local left = redis.call('HEXISTS', KEYS[1], 'version') == 1 and ARGV[3] or 0
redis.call('PEXPIRE', KEYS[1], text(left + math.ceil(ARGV[2] / 500)))
return 1
"""
)

RELEASE = (
    _NOW
    + """
-- name, number, milliseconds until an unused session expires
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[2] then return 0 end
if redis.call('HEXISTS', KEYS[1], 'version') == 0 then return redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], 'until', '0')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[3], text(now), ARGV[1])
return 1
"""
)

SAVE = (
    _NOW
    + """
-- name, number, milliseconds until an unused session expires, record, size of the record, memory
-- or '', random numbers, note, weights
local fields = redis.call('HMGET', KEYS[1], 'fence', 'version', 'tail', 'appended', 'snap')
-- Sent again, as its answer was lost; another server may have acquired it, or appended, since.
if fields[2] == ARGV[2] or fields[5] == ARGV[2] then return 'ok' end
if fields[1] ~= ARGV[2] then
  if string.find(fields[3] or '', ARGV[4], 1, true) then return 'ok' end
  -- Whether a later memory has this turn in it cannot be told.
  return (tonumber(fields[5]) or 0) > tonumber(ARGV[2]) and 'unknown' or 'taken'
end
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[1], 'memory', ARGV[6], 'snap', ARGV[2], 'tail', '', 'appended', '0')
else
  local appended = text((fields[4] or 0) + ARGV[5])
  redis.call('HSET', KEYS[1], 'tail', (fields[3] or '') .. ARGV[4], 'appended', appended)
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'until', '0', 'random', ARGV[7], 'note', ARGV[8],
  'weights', ARGV[9])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[3], text(now), ARGV[1])
return 'ok'
"""
)

LOAD = """
-- 1 for the memory, too; most bytes of the memory, of the tail and of any other field
local limits = {memory = ARGV[2], tail = ARGV[3]}
local names = {'version', 'snap', 'random', 'note', 'weights', 'tail', 'memory'}
for _, name in ipairs(names) do
  if redis.call('HSTRLEN', KEYS[1], name) > tonumber(limits[name] or ARGV[4]) then
    return {'large', name}
  end
end
if ARGV[1] == '0' then names[7] = nil end
local fields = redis.call('HMGET', KEYS[1], unpack(names))
if not fields[1] then return {'missing', ''} end
for i = 1, 7 do fields[i] = fields[i] or '' end
return {'ok', unpack(fields)}
"""

DELETE = (
    _NOW
    + """
-- name
redis.call('ZREM', KEYS[3], ARGV[1])
-- Whatever else has its key goes, too.
local fields = {}
if redis.call('TYPE', KEYS[1]).ok == 'hash' then
  fields = redis.call('HMGET', KEYS[1], 'until', 'version')
end
if (tonumber(fields[1]) or 0) > now then
  redis.call('ZADD', KEYS[3], text(now), ARGV[1])
  return 'busy'
end
return redis.call('DEL', KEYS[1]) == 1 and 'ok' or 'missing'
"""
)

LIST = (
    _NOW
    + """
-- milliseconds until an unused session expires, how many, a name or ''
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', text(now - ARGV[1] * 1000))
local used = {ARGV[3], redis.call('ZSCORE', KEYS[3], ARGV[3]) or text(now)}
local prefix = string.sub(KEYS[1], 1, -1 - #ARGV[3])
if ARGV[3] == '' then used = redis.call('ZREVRANGE', KEYS[3], 0, ARGV[2] - 1, 'WITHSCORES') end
local rows = {}
for i = 1, #used, 2 do
  local fields, status = redis.pcall('HMGET', prefix .. used[i], 'version', 'until'), 'free'
  if fields.err or not tonumber(fields[2] or 0) then
    status = 'damaged'
  elseif not fields[1] then
    status = 'missing'
  elseif tonumber(fields[2] or 0) > now then
    status = 'busy'
  end
  table.insert(rows, {used[i], used[i + 1], status})
end
return rows
"""
)
